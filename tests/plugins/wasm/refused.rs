//! Files that are no policy: refused before they are compiled, or at the start, each with one line.

use std::path::Path;

use tokenrouter::policy::wasm::WasmPlugin;

use super::support::{EXPORTS, MANIFEST, at, create, doing, load, module, section, wat};

const ROUTE: &str = r#"(func (export "tr_route") (param i32) (result i32) (local.get 0))"#;

fn refused(bytes: &[u8], error: &str) {
    let found = load(bytes).err().unwrap_or_else(|| panic!("was not refused: {error}"));
    assert!(found.contains(error), "{found}\nis not: {error}");
    assert!(!found.contains('\n') && found.len() < 500, "not one short line: {found}");
}

#[test]
fn what_is_good() {
    assert!(create(&module(ROUTE)).is_ok());
    // A section that was appended to the finished file.
    let mut bytes = wat(&format!("(module {EXPORTS} {ROUTE})"));
    let name = "tokenrouter:policy";
    bytes.extend([0, (1 + name.len() + MANIFEST.len()) as u8, name.len() as u8]);
    bytes.extend([name.as_bytes(), MANIFEST.as_bytes()].concat());
    assert!(1 + name.len() + MANIFEST.len() < 128 && create(&bytes).is_ok());
    // Large enough to be compiled without optimisation.
    let padded = format!("(@custom \"x\" \"{}\") {ROUTE}", "x".repeat(20_000));
    assert!(create(&module(&padded)).is_ok());
    let simd = "(drop (f32x4.extract_lane 0 (f32x4.sqrt (v128.load (i32.const 0)))))";
    assert!(create(&doing(simd)).is_ok());
}

#[test]
fn case_22_what_is_no_module() {
    refused(b"", "is an empty file, not a WebAssembly module; build the policy as a core module");
    refused(b"hello", "is some other file");
    refused(b"(module)", "is text, not a WebAssembly module; name WebAssembly text with the ending .wat");
    refused(
        b"\x7fELF\x02\x01\x01\0",
        "is an ELF file, not a WebAssembly module; name a native plugin with the ending .so",
    );
    refused(b"\x7fELF\x02\x01\x01\xc8", "is a compiled module (.cwasm), not a WebAssembly module; give the .wasm file");
    refused(b"\0asm\x0d\0\x01\0", "is a component, not a WebAssembly module; give the core module");
    refused(b"\0asm\x02\0\0\0", "is of WebAssembly version 2, this server reads version 1");
    refused(b"\0asm\x01\0", "is a damaged module (its header is cut off or unknown)");
    refused(b"\0asm\x01\0\0\0", "has no export `memory`; a policy exports its memory as `memory`");
}

#[test]
fn case_23_what_is_cut_off() {
    let whole = module(ROUTE);
    for length in 0..whole.len() {
        assert!(load(&whole[..length]).is_err(), "the first {length} of {} bytes", whole.len());
    }
}

#[test]
fn case_19_what_has_imports() {
    let import = |imports: &str| wat(&format!("(module {} {imports} {EXPORTS} {ROUTE})", section(MANIFEST)));
    refused(
        &import(r#"(import "wasi_snapshot_preview1" "fd_write" (func (param i32 i32 i32 i32) (result i32)))"#),
        "imports wasi_snapshot_preview1::fd_write; a policy has no imports: build for wasm32-unknown-unknown",
    );
    refused(
        &import(r#"(import "env" "abort" (func (param i32 i32 i32 i32)))"#),
        "imports env::abort; a policy has no imports: with AssemblyScript, compile with --use abort=",
    );
    refused(&import(r#"(import "__wbindgen_x__" "f" (func))"#), "do not use wasm-bindgen");
    refused(&import(r#"(import "a\nb" "f" (func)) (import "a" "m" (global i32))"#), r"imports a\nb::f, a::m; ");
    let many: String = (0..9).map(|i| format!("(import \"a\" \"f{i}\" (func))")).collect();
    refused(&import(&many), "imports a::f0, a::f1, a::f2, a::f3 and 5 more; ");
    let memory = r#"(module (import "env" "memory" (memory 1)) (export "memory" (memory 0)))"#;
    refused(&wat(memory), "imports env::memory; ");
}

#[test]
fn case_22_what_uses_other_features() {
    let plain = |text: &str| wat(&format!("(module {text})"));
    refused(&plain("(memory i64 1)"), "uses what policies may not: 64-bit memory (memory64); build it without");
    refused(&plain("(memory 1 2 shared)"), "shared memory (threads)");
    refused(&plain("(memory 1) (memory 1)"), "more than one memory");
    refused(&plain("(table 1 funcref) (table 1 funcref)"), "more than one table");
    refused(&plain("(table i64 1 funcref)"), "64-bit tables");
    refused(&plain("(tag)"), "exceptions");
    refused(&plain("(func $f (return_call $f))"), "uses what policies may not: tail calls support is not enabled");
    refused(&plain("(func (param externref))"), "uses what policies may not: ");
    refused(&plain("(type (struct))"), "uses what policies may not: ");
    refused(
        &plain("(func (result i32 i32) (i32.const 1) (i32.const 2))"),
        "uses what policies may not: func type returns multiple values but the multi-value feature is not enabled",
    );
    refused(
        &plain("(func (i32.const 1) (loop (param i32) (drop)))"),
        "uses what policies may not: blocks, loops, and ifs may only produce a resulttype when multi-value is not enabled",
    );
    refused(
        &plain("(func (param v128) (result v128) (f32x4.relaxed_madd (local.get 0) (local.get 0) (local.get 0)))"),
        "uses what policies may not: relaxed SIMD support is not enabled",
    );
    refused(&plain("(memory 1) (func (drop (i32.atomic.load (i32.const 0))))"), "uses what policies may not: threads");
}

#[test]
fn case_20_what_is_too_large() {
    let repeated = |text: &str, times: usize| text.repeat(times);
    let body = |operators: usize| format!("(func {})", repeated("nop ", operators));
    refused(&wat(&format!("(module {})", body(8192))), "has 8193 operators in one function, the limit is 8192");
    refused(&wat(&format!("(module {})", repeated(&body(8000), 9))), "operators, the limit is 65536");
    refused(&wat(&format!("(module {})", repeated("(func)", 257))), "has 257 functions, the limit is 256");
    refused(
        &wat(&format!("(module (func (local {})))", repeated("i32 ", 1001))),
        "1001 local variables in one function",
    );
    let twice = format!("(module {0} {0} {EXPORTS} {ROUTE})", section(MANIFEST));
    refused(&wat(&twice), "has 2 sections `tokenrouter:policy`; leave the one that says what the policy is");
}

#[test]
fn case_17_what_asks_for_too_much() {
    refused(&wat("(module (memory 33))"), "asks for 2162688 bytes of memory, the limit is 2097152; ask for less");
    refused(&wat("(module (memory 65536))"), "asks for 4294967296 bytes of memory, the limit is 2097152; ask for less");
    refused(&wat("(module (table 1025 funcref))"), "has 1025 table entries, the limit is 1024");
    // The 17 pages that compilers ask for by default are fine.
    let seventeen = EXPORTS.replace("\"memory\") 1", "\"memory\") 17");
    assert!(create(&wat(&format!("(module {} {seventeen} {ROUTE})", section(MANIFEST)))).is_ok());
}

#[test]
fn what_is_too_large_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("p.wasm");
    let load = |path: &Path| WasmPlugin::load(path, None).err().unwrap().to_string();
    let prefix = format!("plugin `{}`: ", path.display());
    assert_eq!(load(&path), format!("{prefix}no such file; build the plugin or correct the path"));
    std::fs::File::create(&path).unwrap().set_len((64 << 10) + 1).unwrap();
    assert_eq!(
        load(&path),
        format!("{prefix}has 65537 bytes, more than the 65536 allowed; strip its debug information")
    );
    assert!(load(dir.path()).ends_with("is a directory, not a regular file; give the path of the plugin's file"));
}

/// The file's own hash, and the limit on texts.
#[test]
fn a_text_is_translated() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("p.wat");
    let text = format!("(module {} {EXPORTS} {ROUTE})", section(MANIFEST));
    std::fs::write(&path, &text).unwrap();
    let plugin = WasmPlugin::load(&path, None).unwrap();
    assert!(WasmPlugin::load(&path, Some(plugin.sha256())).is_ok());
    assert_ne!(plugin.sha256(), load(&wat(&text)).unwrap().sha256());
    let error = |content: &[u8]| {
        std::fs::write(&path, content).unwrap();
        WasmPlugin::load(&path, None).err().unwrap().to_string()
    };
    assert!(error(b"(module").contains("`: is not WebAssembly text (expected `)`, line 1, column 8); correct it"));
    assert!(error(b"(module (func (import \"a\" \"f\")))").contains("imports a::f; a policy has no imports"));
    assert!(error(&[b' '; (256 << 10) + 1]).contains("has 262145 bytes, more than the 262144 allowed"));
}

#[test]
fn case_23_a_pinned_hash_must_match() {
    let bytes = module(ROUTE);
    let hash = load(&bytes).unwrap().sha256().to_owned();
    assert!(WasmPlugin::from_bytes(bytes.clone(), Some(&hash.to_uppercase())).is_ok());
    let error = WasmPlugin::from_bytes(bytes, Some(&"0".repeat(64))).err().unwrap().to_string();
    assert!(error.contains(&format!("has SHA-256 {hash}, the configuration wants 000")), "{error}");
}

#[test]
fn what_says_nothing_of_itself() {
    refused(&wat(&format!("(module {EXPORTS} {ROUTE})")), "has no section `tokenrouter:policy`");
    let saying = |json: &str| wat(&format!("(module {} {EXPORTS} {ROUTE})", section(json)));
    refused(&saying(r#"{"abi": 7}"#), "section tokenrouter:policy: the module is for WASM policy ABI 7, this server");
    refused(&saying(r#"{"abi": 1, "name": "p"}"#), "missing field `version`");
    let exporting = |exports: &str| wat(&format!("(module {} {exports})", section(MANIFEST)));
    refused(&exporting(r#"(memory (export "memory") 1)"#), "has no export `tr_block`; a policy exports the address");
    refused(&exporting(EXPORTS), "has no export `tr_route`; a policy exports the function");
    let wrong = format!(r#"{EXPORTS} (global (export "tr_route") i32 (i32.const 0))"#);
    refused(&exporting(&wrong), "has no export `tr_route`");
}

/// What the server would call or read is looked at before it is compiled, by `plugin inspect` as by a server.
#[test]
fn what_has_the_wrong_exports() {
    let saying = |text: &str| wat(&format!("(module {} {text})", section(MANIFEST)));
    let memory = r#"(memory (export "memory") 1)"#;
    let at = |value: &str| format!("{memory} (global (export \"tr_block\") i32 {value}) {ROUTE}");
    let block = |address: &str| saying(&at(&format!("(i32.const {address})")));
    for (address, shown) in [("-1", "4294967295"), ("65536", "65536"), ("52225", "52225")] {
        refused(
            &block(address),
            &format!("tr_block is {shown}, but memory has 65536 bytes and the block 13312; reserve"),
        );
    }
    assert!(create(&block("52224")).is_ok());
    assert!(create(&saying(&at("(i32.add (i32.const 52000) (i32.mul (i32.const 2) (i32.const 112)))"))).is_ok());
    refused(&saying(&at("(i32.sub (i32.const 1) (i32.const 2))")), "tr_block is 4294967295, but memory has");
    let empty = r#"(memory (export "memory") 0) (global (export "tr_block") i32 (i32.const 0))"#;
    refused(&saying(&format!("{empty} {ROUTE}")), "memory has 0 bytes");
    for global in ["(mut i32) (i32.const 0)", "i64 (i64.const 0)", "f32 (f32.const 0)"] {
        let text = format!("{memory} (global (export \"tr_block\") {global}) {ROUTE}");
        refused(&saying(&text), "export `tr_block` is not a constant i32 global");
    }
    let wrong = format!(r#"{EXPORTS} (func (export "tr_route") (result i32) (i32.const 0))"#);
    refused(&saying(&wrong), "export `tr_route` is not a function (i32) -> i32");
    for finished in [
        r#"(func (export "tr_finished"))"#,
        r#"(func (export "tr_finished") (param i32) (result i32) (local.get 0))"#,
        r#"(global (export "tr_finished") i32 (i32.const 0))"#,
    ] {
        let found = saying(&format!("{EXPORTS} {ROUTE} {finished}"));
        refused(&found, "export `tr_finished` is not a function (i32) without a result");
    }
    let configure = r#"(func (export "tr_configure") (param i32) (result i32) (local.get 0))"#;
    refused(&saying(&format!("{EXPORTS} {ROUTE} {configure}")), "export `tr_configure` is not a function () -> i32");
}

/// What only an instance shows, at the start of the server.
#[test]
fn case_16_what_does_not_start() {
    let starting = |text: &str| {
        let bytes = wat(&format!("(module {} {text})", section(MANIFEST)));
        create(&bytes).err().unwrap_or_else(|| panic!("was not refused: {text}"))
    };
    let data = format!(r#"{EXPORTS} {ROUTE} (data (i32.const 65535) "xy")"#);
    assert!(starting(&data).contains("out of bounds"), "{}", starting(&data));
    let configure =
        |body: &str| starting(&format!(r#"{EXPORTS} {ROUTE} (func (export "tr_configure") (result i32) {body})"#));
    assert!(configure("(i32.const 3)").contains("tr_configure refused the settings (code 3)"));
    assert!(configure("(loop (br 0)) (unreachable)").contains("used up its fuel of 10200"));
    assert!(configure("(unreachable)").contains("wasm trap: "));
    refused(&wat("(module (func $f (loop (br 0))) (start $f))"), "has a start function; a policy has none");
}

#[test]
fn what_needs_other_models() {
    let text = r#"{"abi": 1, "name": "p", "version": "1", "roles": ["slm", "llm"], "entry": "slm"}"#;
    let plugin = load(&wat(&format!("(module {} {EXPORTS} {ROUTE})", section(text)))).unwrap();
    let error = |roles: &[&str], entry| at(&plugin, 0, roles, entry, "{}").err().unwrap().to_string();
    assert!(error(&["slm", "x"], 0).contains("p needs exactly two models, with the roles \"slm\" and \"llm\""));
    assert!(error(&["slm", "llm"], 1).contains("p begins at model `m-slm`; set entry = \"m-slm\" in route `r`"));
    assert!(at(&plugin, 0, &["llm", "slm"], 1, "{}").is_ok());
}
