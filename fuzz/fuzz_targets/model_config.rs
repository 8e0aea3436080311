#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tokenrouter::fuzzing::model_config(bytes));
