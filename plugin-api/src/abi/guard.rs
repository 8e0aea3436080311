//! Panics stay inside the plugin: it has its own copy of the standard library, so nobody else can
//! catch them.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

use abi_stable::std_types::{RResult, RString};

thread_local! {
    /// Guarded calls on this thread.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    /// Where the newest panic under a guard began.
    static LOCATION: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Note where a guarded call panics in place of printing it: the host reports it. Panics elsewhere
/// (threads that a policy started) are printed as ever.
pub(crate) fn install_hook() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        let previous = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if DEPTH.get() == 0 {
                previous(info);
            } else {
                LOCATION.set(info.location().map(ToString::to_string));
            }
        }));
    });
}

/// Run an author's code. An error or a panic becomes one line of text.
pub(crate) fn guard<T, U: From<T>>(body: impl FnOnce() -> Result<T, String>) -> RResult<U, RString> {
    DEPTH.set(DEPTH.get() + 1);
    let result = catch_unwind(AssertUnwindSafe(body));
    DEPTH.set(DEPTH.get() - 1);
    match result {
        Ok(Ok(value)) => RResult::ROk(value.into()),
        Ok(Err(message)) => RResult::RErr(message.into()),
        Err(payload) => {
            let message = match (payload.downcast_ref::<&str>(), payload.downcast_ref::<String>()) {
                (Some(text), _) => (*text).to_owned(),
                (_, Some(text)) => text.clone(),
                _ => "a panic without a message".to_owned(),
            };
            // A payload's own Drop may panic, with a payload whose Drop may panic, and so on.
            if let Err(again) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
                std::mem::forget(again);
            }
            let place = LOCATION.take().map_or(String::new(), |location| format!(" at {location}"));
            RResult::RErr(format!("panicked{place}: {message}").into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(body: impl FnOnce() -> Result<(), String>) -> String {
        match guard::<(), ()>(body) {
            RResult::ROk(()) => "ok".to_owned(),
            RResult::RErr(message) => message.into_string(),
        }
    }

    #[test]
    fn turns_panics_into_messages() {
        install_hook();
        assert_eq!(message(|| Ok(())), "ok");
        assert_eq!(message(|| Err("no".to_owned())), "no");
        let text = message(|| panic!("number {}", 7));
        assert!(text.starts_with("panicked at plugin-api/src/abi/guard.rs:") && text.ends_with(": number 7"), "{text}");
        assert!(message(|| std::panic::panic_any(7)).ends_with(": a panic without a message"));
    }

    #[test]
    fn survives_a_payload_that_panics_when_dropped() {
        struct Bomb;
        impl Drop for Bomb {
            fn drop(&mut self) {
                std::panic::panic_any(Bomb);
            }
        }
        install_hook();
        assert!(message(|| std::panic::panic_any(Bomb)).ends_with(": a panic without a message"));
        assert_eq!(DEPTH.get(), 0);
    }
}
