#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tokenrouter::fuzzing::wat_text(bytes));
