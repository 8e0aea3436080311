//! Whatever the bytes, loading ends in a policy or in one line.

use proptest::prelude::*;
use tokenrouter::policy::wasm::WasmPlugin;

use super::support::{at, decide, load, wat};

fn good() -> Vec<u8> {
    wat(include_str!("../../../plugins/rstitch/rstitch.wat"))
}

/// Load, and let it decide as far as it goes.
fn survive(bytes: &[u8]) {
    match load(bytes) {
        Err(error) => {
            assert!(!error.contains('\n') && error.len() < 1000, "not one short line: {error}");
            // A compiler that panics is reported so.
            assert!(!error.contains("the compiler failed"), "{error}");
        }
        Ok(plugin) => try_it(&plugin),
    }
}

fn try_it(plugin: &WasmPlugin) {
    for model in 0..2 {
        if let Ok(mut policy) = at(plugin, model, &["slm", "llm"], 0, r#"{"threshold": 0.5}"#) {
            let _ = decide(&mut *policy, &[1, 1000], &[0.25, f32::NAN]);
            let _ = policy.finished(0);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..400), module in any::<bool>()) {
        let header: &[u8] = if module { b"\0asm\x01\0\0\0" } else { b"" };
        survive(&[header, &bytes].concat());
    }

    #[test]
    fn damaged_modules(damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4), cut in any::<Option<prop::sample::Index>>()) {
        let mut bytes = good();
        for (at, byte) in damage {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        survive(&bytes);
    }

    /// Damage in the code alone, which passes the gate more often.
    #[test]
    fn damaged_code(damage in proptest::collection::vec((0..120usize, any::<u8>()), 1..3)) {
        let mut bytes = good();
        let length = bytes.len();
        for (from_end, byte) in damage {
            bytes[length - 1 - from_end] = byte;
        }
        survive(&bytes);
    }
}
