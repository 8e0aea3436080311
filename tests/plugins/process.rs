//! Plugins that end their process, or would.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tokenrouter::policy::wasm::WasmPlugin;

use crate::support::built;
use crate::wasm::support::doing;

/// The newest library of the plugin API that was built beside this test.
fn api() -> PathBuf {
    let files = std::fs::read_dir(built().join("deps")).unwrap().map(|entry| entry.unwrap().path());
    let is_api = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        name.starts_with("libtokenrouter_plugin_api-") && name.ends_with(".rlib")
    };
    files.filter(is_api).max_by_key(|path| path.metadata().unwrap().modified().unwrap()).unwrap()
}

#[test]
fn case_11_a_plugin_that_could_not_unwind_does_not_compile() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("lib.rs");
    let text = "use tokenrouter_plugin_api::*;
        struct P;
        impl Policy for P {
            const NAME: &'static str = \"p\";
            fn create(_: &Context<'_>, _: &str) -> Result<Self, PolicyError> { Ok(P) }
            fn route(&mut self, _: &RouteBatch<'_>, _: &mut [Decision]) {}
        }
        export_policy!(P);";
    std::fs::write(&source, text).unwrap();
    let compile = |panic: &str| {
        let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
        rustc.args(["--edition", "2024", "--crate-type", "lib", "--crate-name", "p", "--emit", "metadata"]);
        rustc.env("CARGO_PKG_VERSION", "1.0.0").env("CARGO_CRATE_NAME", "p");
        rustc.arg("-C").arg(format!("panic={panic}")).arg("-L").arg(built().join("deps"));
        rustc.arg("--extern").arg(format!("tokenrouter_plugin_api={}", api().display()));
        let output = rustc.arg("--out-dir").arg(dir.path()).arg(&source).output().unwrap();
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    };
    let (compiles, errors) = compile("unwind");
    assert!(compiles, "{errors}");
    let (compiles, errors) = compile("abort");
    assert!(!compiles && errors.contains("a TokenRouter plugin needs panic = \"unwind\""), "{errors}");
}

/// Nothing can hold them in the server's process, so the kit for authors runs plugins in another one.
#[test]
fn case_11_a_plugin_that_ends_its_process_is_found_before_it_serves() {
    let program = built().join("tokenrouter");
    assert!(program.is_file(), "{} is not built; run the tests with `cargo xtask test`", program.display());
    for (end, how) in [("abort", "by signal 6 (SIGABRT)"), ("exit", "with exit status 0")] {
        let settings = format!(r#"{{"serve": true, "end": "{end}"}}"#);
        let mut check = Command::new(&program);
        check.args(["plugin", "check", "--settings", &settings]).arg(built().join("libprobe.so"));
        let output = check.output().unwrap();
        let table = String::from_utf8(output.stdout).unwrap();
        assert_eq!(output.status.code(), Some(1), "{table}");
        // The table breaks long lines.
        let words = table.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words.contains(&format!("the plugin ended the process {how}")), "{table}");
    }
}

/// What a server would refuse, `plugin inspect` refuses.
#[test]
fn case_22_inspect_and_load_agree() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("p.wasm");
    let with = |exports: &str| {
        format!(
            r#"(module (@custom "tokenrouter:policy" "{{\"abi\": 1, \"name\": \"p\", \"version\": \"1\"}}")
                (memory (export "memory") 1) {exports}
                (func (export "tr_route") (param i32) (result i32) (local.get 0)))"#
        )
    };
    let block = |address: u32| format!(r#"(global (export "tr_block") i32 (i32.const {address}))"#);
    for (exports, refused) in [
        (block(0), None),
        (block(60_000), Some("tr_block is 60000, but memory has 65536 bytes")),
        (block(0) + r#"(func (export "tr_finished"))"#, Some("export `tr_finished` is not a function (i32)")),
        (block(0) + r#"(func (export "tr_configure"))"#, Some("export `tr_configure` is not a function () -> i32")),
    ] {
        std::fs::write(&file, wat::parse_str(with(&exports)).unwrap()).unwrap();
        let output = Command::new(built().join("tokenrouter")).args(["plugin", "inspect"]).arg(&file).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        let loaded = WasmPlugin::load(&file, None).err().map(|error| error.to_string());
        assert_eq!(
            (output.status.code(), loaded.is_some()),
            (Some(if refused.is_some() { 2 } else { 0 }), refused.is_some())
        );
        assert!(refused.is_none_or(|text| error.contains(text) && loaded.unwrap().contains(text)), "{error}");
    }
}

/// A loop without end ends a server that says so, with a line in the log that names all there is to name.
#[test]
fn case_15_a_server_may_end_itself() {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("models/demo");
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("c.toml");
    let text = format!(
        "plugin_dirs = [{built:?}]
        [server]
        port = 0
        abort_on_hung_plugin_s = 1.5
        [models.small]
        path = \"{models}/small\"
        [routes.bad]
        plugin = \"probe\"
        models = [\"small\"]
        on_error = \"disable_route\"
        settings = {{ serve = true, panic = \"finished\" }}
        [routes.loops]
        plugin = \"probe\"
        models = [\"small\"]
        settings = {{ serve = true, end = \"hang\" }}
        [routes.traps]
        plugin = \"./traps.wasm\"
        models = [\"small\"]
        [routes.floods]
        plugin = \"probe\"
        models = [\"small\"]
        settings = {{ serve = true, log_lines = 500 }}
        ",
        built = built().display().to_string(),
        models = models.display()
    );
    std::fs::write(&config, text).unwrap();
    // In the second token of an answer.
    let traps = doing("(if (i32.eq (local.get $first) (i32.const 1)) (then unreachable))");
    std::fs::write(dir.path().join("traps.wasm"), traps).unwrap();
    let mut serve = Command::new(built().join("tokenrouter"));
    serve.arg("serve").arg(&config).current_dir(dir.path()).env("NO_COLOR", "1").env_remove("RUST_LOG");
    // A file, which is never full as a pipe is.
    let log = dir.path().join("log");
    serve.stdout(Stdio::piped()).stderr(std::fs::File::create(&log).unwrap());
    let mut server = serve.spawn().unwrap();
    let mut lines = BufReader::new(server.stdout.take().unwrap()).lines().map(Result::unwrap);
    let line = lines.find(|line| line.contains(" at http://")).expect("the server starts");
    let address = line.rsplit_once("http://").unwrap().1.trim().to_owned();
    let ask = |route: &str| {
        let body = format!(r#"{{"model": "{route}", "prompt": "1", "max_tokens": 2}}"#);
        let mut stream = TcpStream::connect(&address).unwrap();
        let length = body.len();
        write!(
            stream,
            "POST /v1/completions HTTP/1.1\r\nHost: t\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
        )
        .unwrap();
        // The one that hangs ends with the process.
        BufReader::new(stream).lines().map_while(Result::ok).collect::<Vec<_>>().join("\n")
    };
    assert!(["bad", "traps"].into_iter().all(|route| ask(route).starts_with("HTTP/1.1 200")));
    ask("loops");
    let status = server.wait().unwrap();
    let log = std::fs::read_to_string(log).unwrap();
    assert_eq!(status.signal(), Some(6), "{status}");
    let line =
        |words: &str| log.lines().find(|line| line.contains(words)).unwrap_or_else(|| panic!("no line with {words}"));
    // Once before anything is loaded, and once to serve.
    let flood: Vec<&str> = log.lines().filter(|line| line.contains("route=\"floods\"")).collect();
    assert_eq!(flood.len(), 2 * 101);
    assert!(flood.iter().all(|line| line.len() < 1400 && !line.contains('\x1b')));
    assert!(flood[100].contains("the rest is left out"), "{}", flood[100]);
    let failed = line("the finished hook was told to panic");
    assert!(failed.contains("the route takes no new requests"), "{failed}");
    let (hangs, ends) = (line("a hook does not come back"), line("the process ends itself"));
    let restarts = line("it starts anew without its state, 3 of 3 in a minute");
    let gone = line("it was started anew 3 times in the minute before");
    for (line, plugin, route, hook) in [
        (failed, "probe", "bad", "finished"),
        (hangs, "probe", "loops", "route"),
        (ends, "probe", "loops", "route"),
        (restarts, "p", "traps", "route"),
        (gone, "p", "traps", "route"),
    ] {
        for field in [("plugin", plugin), ("route", route), ("model", "small"), ("hook", hook)] {
            let (name, value) = field;
            assert!(line.contains(&format!("{name}=\"{value}\"")) && line.contains("step="), "{field:?}: {line}");
        }
    }
}
