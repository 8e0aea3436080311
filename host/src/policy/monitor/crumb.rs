//! Which hook of an instance runs just now: for the watchdog, and for whoever reads a core dump.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::{Hook, Names};

/// Begins the line.
const TITLE: [u8; 16] = *b"TOKENROUTER-IN: ";
/// In place of a hook's name.
const OUTSIDE: u64 = u64::from_ne_bytes(*b"--------");
const WHO: usize = 128;

/// The hook's name, as it lies in memory.
fn mark(hook: Hook) -> u64 {
    u64::from_ne_bytes(match hook {
        Hook::Entry => *b"entry   ",
        Hook::Route => *b"route   ",
        Hook::Send => *b"send    ",
        Hook::Receive => *b"receive ",
        Hook::Finished => *b"finished",
        Hook::Create => *b"create  ",
        Hook::Variant => *b"variant ",
        Hook::Drop => *b"drop    ",
    })
}

/// The first three fields are one line of text in memory, so that
/// `strings CORE | grep 'TOKENROUTER-IN: '` tells what ran when a process died, without symbols.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Breadcrumb {
    #[allow(dead_code)] // Read in core dumps only.
    title: [u8; 16],
    /// Eight characters.
    hook: AtomicU64,
    #[allow(dead_code)] // Read in core dumps only.
    who: [u8; WHO],
    /// Calls that have begun.
    calls: AtomicU64,
    step: AtomicU64,
}

impl Breadcrumb {
    pub fn new(names: &Names) -> Self {
        let text = format!("of plugin {}, route {}, model {}", names.plugin, names.route, names.model);
        let mut who = [0; WHO];
        who.iter_mut().zip(text.bytes()).for_each(|(to, byte)| *to = byte);
        Self { title: TITLE, hook: AtomicU64::new(OUTSIDE), who, calls: AtomicU64::new(0), step: AtomicU64::new(0) }
    }

    /// The model's step that the calls from now on belong to.
    pub fn at_step(&self, step: u64) {
        self.step.store(step, Relaxed);
    }

    pub fn step(&self) -> u64 {
        self.step.load(Relaxed)
    }

    pub fn enter(&self, hook: Hook) {
        self.calls.store(self.calls.load(Relaxed).wrapping_add(1), Relaxed);
        self.hook.store(mark(hook), Relaxed);
    }

    pub fn leave(&self) {
        self.hook.store(OUTSIDE, Relaxed);
    }

    /// The hook that runs, and the number of its call.
    pub fn inside(&self) -> Option<(Hook, u64)> {
        let call = self.calls.load(Relaxed);
        let now = self.hook.load(Relaxed);
        Hook::ALL
            .into_iter()
            .chain([Hook::Create, Hook::Variant, Hook::Drop])
            .find(|hook| mark(*hook) == now)
            .map(|hook| (hook, call))
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    #[test]
    fn the_texts_lie_behind_each_other() {
        let places = [offset_of!(Breadcrumb, title), offset_of!(Breadcrumb, hook), offset_of!(Breadcrumb, who)];
        assert_eq!(places, [0, 16, 24]);
        let names = Names { route: "r".into(), model: "x".repeat(200), plugin: "p".into() };
        let crumb = Breadcrumb::new(&names);
        assert!(crumb.who.starts_with(b"of plugin p, route r, model xxx"));
        assert_eq!((&crumb.title, crumb.hook.load(Relaxed)), (&TITLE, OUTSIDE));
        for hook in Hook::ALL.into_iter().chain([Hook::Create, Hook::Drop]) {
            assert_eq!(String::from_utf8_lossy(&mark(hook).to_ne_bytes()).trim_end(), hook.name());
        }
    }

    #[test]
    fn each_hook_is_told_from_the_others_and_from_outside() {
        let crumb = Breadcrumb::new(&Names { route: "r".into(), model: "m".into(), plugin: "p".into() });
        assert_eq!(crumb.inside(), None);
        for (call, hook) in (1..).zip(Hook::ALL.into_iter().chain([Hook::Create, Hook::Variant, Hook::Drop])) {
            crumb.enter(hook);
            assert_eq!(crumb.inside(), Some((hook, call)));
            crumb.leave();
            assert_eq!(crumb.inside(), None);
        }
    }
}
