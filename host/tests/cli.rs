//! The program as its users meet it: exit status, one line for each mistake, answers, signals.
//!
//! The plugins must be built beside the program, as `cargo xtask test` does.
#![allow(clippy::unwrap_used)] // Helpers of tests.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf()
}

fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tokenrouter"));
    command.current_dir(root()).stdin(Stdio::null());
    for (name, _) in std::env::vars() {
        if name.starts_with("TOKENROUTER__") || name == "RUST_LOG" {
            command.env_remove(name);
        }
    }
    command
}

fn run(arguments: &[&str]) -> Output {
    program().args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// The one line of a refused command.
fn refusal(output: &Output) -> String {
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(output.stdout.is_empty(), "{}", text(&output.stdout));
    assert_eq!(error.lines().count(), 1, "{error}");
    error.strip_prefix("error: ").unwrap().trim_end().into()
}

/// A directory with a copy of the small demo model as `model`, and a configuration.
fn copied(config: &str) -> (TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    std::fs::create_dir(&model).unwrap();
    for entry in std::fs::read_dir(root().join("models/demo/small")).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), model.join(entry.file_name())).unwrap();
    }
    let file = dir.path().join("c.toml");
    let demo = root().join("models/demo").display().to_string();
    std::fs::write(&file, config.replace("DEMO", &demo)).unwrap();
    let file = file.display().to_string();
    (dir, file)
}

const ONE: &str = "[models.m]\npath = 'model'\nkv_memory = '8MiB'\n";
const PAIR: &str = "[models.m]\npath = 'model'\n[models.n]\npath = 'DEMO/medium'\n";

#[test]
fn check_of_the_demo() {
    let output = run(&["check", "config/demo.toml"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let stdout = text(&output.stdout);
    for part in
        ["qwen3, 2 layers x 160", "small = slm (entry), large = llm", "small (entry), medium, large", "is in order"]
    {
        assert!(stdout.contains(part), "{part}: {stdout}");
    }
    assert_eq!(text(&output.stderr), "");
}

#[test]
fn check_of_the_example() {
    let output = run(&["check", "examples/cascade/cascade.toml"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(
        text(&output.stdout).contains("small = slm (entry), medium = mlm, large = llm"),
        "{}",
        text(&output.stdout)
    );
}

#[test]
fn check_of_a_wasm_policy() {
    let module = wat::parse_str(include_str!("../../plugins/rstitch/rstitch.wat")).unwrap();
    let wasm = |roles: &str, settings: &str| {
        let route = format!("[routes.r]\nplugin = './p.wasm'\nroles = {{ {roles} }}\nsettings = {{ {settings} }}\n");
        let (dir, file) = copied(&format!("{PAIR}{route}"));
        std::fs::write(dir.path().join("p.wasm"), &module).unwrap();
        (run(&["check", &file]), dir)
    };
    let roles = "m = 'slm', n = 'llm'";
    let (output, _dir) = wasm(roles, "threshold = 0.2");
    let stdout = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(stdout.contains("rstitch 0.1.0") && stdout.contains("p.wasm"), "{stdout}");
    for (roles, settings, message) in [
        (roles, "treshold = 0.2", "settings/treshold = 0.2: no such setting"),
        (roles, "threshold = 2", "settings/threshold = 2: "),
        ("m = 'x', n = 'llm'", "", "rstitch needs exactly two models, with the roles"),
    ] {
        let refused = refusal(&wasm(roles, settings).0);
        assert!(refused.contains(message) && refused.contains("c.toml:"), "{refused}");
    }
}

/// Who takes how much is a table; what to do is the last line.
#[test]
fn what_does_not_fit_in_memory() {
    let (_dir, file) = copied("[models.m]\npath = 'model'\ndevice = 'cpu'\npages = 1073741824\n");
    let output = run(&["check", &file]);
    assert_eq!((output.status.code(), text(&output.stdout)), (Some(2), String::new()));
    let error = text(&output.stderr);
    let lines: Vec<&str> = error.lines().collect();
    let [head, model, host, last] = lines.as_slice() else { panic!("{error}") };
    assert!(head.starts_with("model ") && model.starts_with("m ") && host.starts_with("cpu: "), "{error}");
    assert!(last.starts_with("error: ") && last.contains("c.toml: the models need "), "{error}");
}

#[test]
fn refused_configurations() {
    for (config, message) in [
        ("[server]\nprot = 1\n", "c.toml:2: unknown key `server.prot`: did you mean `port`?"),
        (
            "[models.m]\npath = 'nowhere/at/all'\n",
            "c.toml:2: models.m.path = \"nowhere/at/all\": there is no directory ",
        ),
        ("[models.m]\npath = 'model'\ncontext = 9999\n", "c.toml:2: models.m: "),
        (
            "[models.m]\npath = 'model'\nkv_memory = '1KiB'\n",
            "c.toml:2: models.m: the K/V pool has no room for one page ",
        ),
        ("[models.m]\npath = 'model'\ndevice = 'cuda:1023'\n", "c.toml:2: models.m.device = \"cuda:1023\": "),
    ] {
        let (_dir, file) = copied(config);
        let refused = refusal(&run(&["check", &file]));
        assert!(refused.contains(message), "{refused}");
    }
    for (plugin, message) in [
        ("plugin = 'frobnicate'", "routes.r.plugin = \"frobnicate\": plugin `frobnicate` is in none of these places: "),
        ("plugin = './c.toml'", "routes.r.plugin = \"./c.toml\": "),
        ("plugin = './x.wasm'", "x.wasm`: no such file; build the plugin or correct the path"),
        ("plugin = 'frobnicate.wasm'", "plugin `frobnicate.wasm` is in none of these places: "),
        ("plugin = 'rstitch'\nsettings = { treshold = 0.1 }", "routes.r.settings: "),
        ("plugin = 'rstitch'\nsettings = { threshold = 3 }", "routes.r.settings: "),
        ("plugin = 'rstitch'", "rstitch needs exactly two models"),
        (
            "plugin = 'rstitch'\nsha256 = '0000000000000000000000000000000000000000000000000000000000000000'",
            "routes.r.plugin = ",
        ),
    ] {
        let (_dir, file) = copied(&format!("{PAIR}[routes.r]\nmodels = ['m', 'n']\n{plugin}\n"));
        let refused = refusal(&run(&["check", &file]));
        assert!(refused.contains(message), "{refused}");
        assert!(refused.contains("c.toml:"), "{refused}");
    }
}

/// Whatever a route's policy, settings or router weights do not fit is refused before weights are loaded.
#[test]
fn refused_policies() {
    let route = |plugin: &str, settings: &str| {
        let pair = "roles = { m = 'slm', n = 'llm' }";
        let (_dir, file) =
            copied(&format!("{PAIR}[routes.r]\nplugin = '{plugin}'\n{pair}\nsettings = {{ {settings} }}\n"));
        let refused = refusal(&run(&["check", &file]));
        assert!(refused.contains("c.toml:"), "{refused}");
        refused
    };
    const R2R: &str = "router = 'DEMO/routers/r2r/router.pt'";
    for (plugin, settings, message) in [
        ("r2r", "", "router"),
        ("r2r", "router = 'none.pt'", "does not exist; give a .safetensors, .pt or .pth file"),
        ("r2r", "router = 'DEMO/small/model.safetensors'", "model_type"),
        (
            "r2r",
            &format!("{R2R}, threshold = 1.5"),
            "settings/threshold = 1.5: the value is greater than the maximum of 1",
        ),
        ("r2r", &format!("{R2R}, threshold = nan"), "threshold"),
        ("r2r", &format!("{R2R}, entropy_threshold = 0.5"), "entropy_threshold"),
        ("r2r", &format!("strategy = 'entropy', {R2R}"), "router"),
        (
            "citer",
            "router = 'DEMO/routers/r2r/router.pt'",
            "the file lacks linear.bias, linear.weight, mlp.0.bias and 7 more",
        ),
        ("collm", "threshold = 0.5", "defer_token is `<|defer|>`, which model `m` does not have"),
        ("collm", "threshold = nan", "threshold"),
        ("glimprouter", "threshold = 9", "settings/threshold = 9"),
        ("query_level", "mode = 'share'", "share"),
        ("random", "probabilities = { n = 2 }", "settings/probabilities/n = 2"),
        ("verify", "draft_tokens = 0", "settings/draft_tokens = 0"),
        ("me", "weights = { m = 0.5, n = inf }", "weights"),
    ] {
        let refused = route(plugin, settings);
        assert!(refused.contains(message), "{plugin} {settings}: {refused}");
    }
    // A router of the small model at the medium one: both sizes are named.
    for (plugin, router) in [("r2r", "r2r/router.safetensors"), ("r2r", "r2r/router.pt"), ("citer", "citer/router.pth")]
    {
        let swapped = "[models.m]\npath = 'model'\n[models.n]\npath = 'DEMO/medium'\n[routes.r]\n\
                       roles = { n = 'slm', m = 'llm' }\n";
        let settings = format!("plugin = '{plugin}'\nsettings = {{ router = 'DEMO/routers/{router}' }}\n");
        let (_dir, file) = copied(&format!("{swapped}{settings}"));
        let refused = refusal(&run(&["check", &file]));
        assert!(refused.contains("model `n` has hidden size 224") && refused.contains("160"), "{refused}");
    }
    // A token that is never sampled must exist.
    let (_dir, file) = copied(&format!("{ONE}masked_tokens = ['<|nothing|>']\n"));
    let refused = refusal(&run(&["check", &file]));
    assert!(refused.contains("models.m.masked_tokens: the model has no token \"<|nothing|>\""), "{refused}");
}

#[test]
fn refused_models() {
    let damaged = |config: &str, name: &str, damage: &dyn Fn(Vec<u8>) -> Option<Vec<u8>>| {
        let (dir, file) = copied(config);
        let place = dir.path().join("model").join(name);
        match damage(std::fs::read(&place).unwrap()) {
            Some(bytes) => std::fs::write(&place, bytes).unwrap(),
            None => std::fs::remove_file(&place).unwrap(),
        }
        refusal(&run(&["check", &file]))
    };
    let replace = |from: &'static str, to: &'static str| {
        move |bytes: Vec<u8>| {
            let changed = text(&bytes).replacen(from, to, 1);
            assert_ne!(changed.as_bytes(), bytes, "{from} is not in the file");
            Some(changed.into_bytes())
        }
    };
    type Damage<'a> = &'a dyn Fn(Vec<u8>) -> Option<Vec<u8>>;
    let cases: [(&str, Damage<'_>, &str); 8] = [
        ("config.json", &|_| None, "config.json"),
        ("model.safetensors", &|_| None, "model.safetensors"),
        ("tokenizer.json", &|_| None, "tokenizer.json"),
        ("model.safetensors", &|bytes| Some(bytes[..bytes.len() - 100].to_vec()), "model.safetensors"),
        ("model.safetensors", &|bytes| Some(bytes[..5].to_vec()), "model.safetensors"),
        ("config.json", &replace("\"intermediate_size\": 512", "\"intermediate_size\": 513"), "513"),
        ("config.json", &replace("Qwen3ForCausalLM", "GPT2LMHeadModel"), "GPT2LMHeadModel"),
        ("config.json", &replace("{", "["), "config.json"),
    ];
    for (file, damage, named) in cases {
        let refused = damaged(ONE, file, damage);
        assert!(refused.contains("c.toml:2: models.m: "), "{refused}");
        assert!(refused.contains(named), "{named}: {refused}");
    }
    let route = format!("{PAIR}[routes.r]\nplugin = 'rstitch'\nroles = {{ m = 'slm', n = 'llm' }}\n");
    let refused = damaged(&route, "tokenizer.json", &replace("\"<|im_start|>\"", "\"<|im_other|>\""));
    for part in ["c.toml:5: routes.r: ", "`m` and `n`", "<|im_other|>", "<|im_start|>"] {
        assert!(refused.contains(part), "{part}: {refused}");
    }
}

/// The demo's small model with `tokenizer.json` changed.
fn with_tokenizer(change: impl FnOnce(&mut Value)) -> (TempDir, String) {
    let (dir, file) = copied(ONE);
    let place = dir.path().join("model/tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&std::fs::read(&place).unwrap()).unwrap();
    change(&mut tokenizer);
    std::fs::write(&place, tokenizer.to_string()).unwrap();
    (dir, file)
}

#[test]
fn tokenizers_that_do_not_fit() {
    // The library loads it, and panics at each text.
    let (_dir, file) = with_tokenizer(|tokenizer| {
        tokenizer["post_processor"] = serde_json::json!({
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<none>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {},
        });
    });
    let refused = refusal(&run(&["check", &file]));
    assert!(refused.contains("c.toml:2: models.m: "), "{refused}");
    assert!(refused.contains("tokenizer.json: cannot encode the text `a` ("), "{refused}");

    let (_dir, file) = with_tokenizer(|tokenizer| tokenizer["model"]["vocab"]["zzzz"] = 2500.into());
    let refused = refusal(&run(&["check", &file]));
    assert!(refused.contains("id 2500, but vocab_size of config.json is 2048"), "{refused}");

    let (_dir, file) = with_tokenizer(|tokenizer| {
        let mut added = tokenizer["added_tokens"][0].clone();
        added["content"] = "<new>".into();
        added["id"] = 2048.into();
        tokenizer["added_tokens"].as_array_mut().unwrap().push(added);
    });
    let output = run(&["check", &file]);
    let told = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{told}");
    assert!(told.contains("\"<new>\" has id 2048, but vocab_size of config.json is 2048"), "{told}");
}

/// A pipe whose reader has left.
fn broken_pipe() -> Stdio {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    writer.into()
}

fn full_disk() -> Stdio {
    std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap().into()
}

#[test]
fn output_that_fails() {
    let generate = ["generate", "config/demo.toml", "--route", "small", "--prompt", "x", "--max-tokens", "2"];
    for arguments in [&["check", "config/demo.toml"][..], &generate] {
        let output = program().args(arguments).stdout(broken_pipe()).stderr(Stdio::piped()).output().unwrap();
        assert_eq!((output.status.code(), text(&output.stderr).as_str()), (Some(0), ""), "{arguments:?}");
        let output = program().args(arguments).stdout(full_disk()).stderr(Stdio::piped()).output().unwrap();
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(error.starts_with("error: standard output: ") && error.lines().count() == 1, "{error}");
    }
    // What cannot be told does not change how it ends.
    let refused = program().args(["check", "none.toml"]).stderr(broken_pipe()).status().unwrap();
    assert_eq!(refused.code(), Some(2));
    assert_eq!(program().args(generate).stdout(Stdio::null()).stderr(full_disk()).status().unwrap().code(), Some(0));
}

#[test]
fn refused_arguments() {
    let refused = refusal(&run(&["check", "none.toml"]));
    assert!(refused.starts_with("none.toml: there is no such file"), "{refused}");
    let refused = refusal(&run(&["generate", "config/demo.toml", "--route", "rstich", "--prompt", "x"]));
    assert_eq!(refused, "--route \"rstich\": config/demo.toml has no such route or model: did you mean `rstitch`?");
    let refused = refusal(&run(&["generate", "config/demo.toml", "--route", "small", "--prompt-ids", "1,99999"]));
    assert_eq!(refused, "--prompt: prompt token 99999 is outside the vocabulary; ids are below 2048");
    let long = ["generate", "config/demo.toml", "--route", "small", "--prompt", "x", "--max-tokens", "4000"];
    let refused = refusal(&run(&long));
    assert!(refused.contains("maximum context length is 2048 tokens"), "{refused}");
    let refused = refusal(&run(&["check", "config/demo.toml", "--log", "a=b=c"]));
    assert!(refused.starts_with("--log \"a=b=c\": "), "{refused}");
    // Mistakes in the arguments themselves are clap's to report.
    let output = run(&["generate", "c.toml", "--route", "r", "--prompt", "x", "--temperature", "-1"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("'-1' for '--temperature <T>': must be from 0 to 2"));
}

#[test]
fn help_has_examples() {
    for command in ["serve", "generate", "check", "doctor"] {
        let output = run(&[command, "--help"]);
        assert_eq!(output.status.code(), Some(0));
        assert!(text(&output.stdout).contains(&format!("tokenrouter {command} config/demo.toml")), "{command}");
    }
}

/// One of the demo's problems that the small model does not solve alone.
const QUESTION: &str = "Ivan has 16 boxes of 28 shoes and 86 single shoes. 6 shops get the same number. How many shoes \
                        does a shop get?";

#[test]
fn a_generated_answer() {
    let question = ["generate", "config/demo.toml", "--route", "rstitch", "--prompt", QUESTION];
    let plain = run(&question);
    assert_eq!(plain.status.code(), Some(0), "{}", text(&plain.stderr));
    let answer = text(&plain.stdout);
    assert!(!answer.contains('\x1b'));
    let legend = text(&plain.stderr);
    assert!(legend.contains("small ") && legend.contains("large ") && legend.contains("hand-off"), "{legend}");

    let json = run(&[&question[..], &["--json"]].concat());
    let json: Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(json["text"].as_str().unwrap().to_owned() + "\n", answer);
    let tokens = json["tokens"].as_array().unwrap();
    let joined: String = tokens.iter().map(|t| t["text"].as_str().unwrap()).collect();
    assert_eq!(joined, json["text"].as_str().unwrap());
    assert_eq!(json["usage"]["completion_tokens"].as_u64().unwrap(), tokens.len() as u64);
    for model in ["small", "large"] {
        let count = tokens.iter().filter(|t| t["model"] == model).count();
        assert!(count > 0, "{json}");
        assert_eq!(json["usage"]["tokens_by_model"][model], count);
    }
    assert!(tokens.iter().all(|t| t["logprob"].is_number() && t["signals"]["entropy_norm"].is_number()), "{json}");

    let mut piped = program()
        .args(["generate", "config/demo.toml", "--route", "rstitch", "--prompt", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    piped.stdin.take().unwrap().write_all(QUESTION.as_bytes()).unwrap();
    assert_eq!(text(&piped.wait_with_output().unwrap().stdout), answer);
}

#[test]
fn a_port_in_use() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let refused = refusal(&run(&["serve", "config/demo.toml", "--port", &port.to_string()]));
    assert_eq!(
        refused,
        format!(
            "server.port = {port}: 127.0.0.1:{port} is in use; stop the program that listens there, or choose another port with --port"
        )
    );
}

/// Before anything is loaded: the model does not exist.
#[test]
fn an_admin_address_in_the_way_of_the_servers_own() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("t.toml");
    std::fs::write(&file, format!("[server]\nadmin = \"{free}\"\n[models.m]\npath = \"m\"\n")).unwrap();
    let (file, port) = (file.to_str().unwrap(), free.port().to_string());
    let refused = refusal(&run(&["serve", file, "--host", "0.0.0.0", "--port", &port]));
    assert!(refused.starts_with(&format!("server.admin = \"{free}\": cannot listen there (")), "{refused}");
}

/// A running server; ended when a test fails.
struct Server {
    process: Child,
    address: String,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Server {
    fn start() -> Self {
        Self::logging("warn", Stdio::null())
    }

    fn logging(filter: &str, stderr: impl Into<Stdio>) -> Self {
        Self::with(&[], filter, stderr)
    }

    fn with(variables: &[(&str, &str)], filter: &str, stderr: impl Into<Stdio>) -> Self {
        let mut process = program()
            .args(["serve", "config/demo.toml", "--port", "0", "--log", filter])
            .envs(variables.iter().copied())
            .stdout(Stdio::piped())
            .stderr(stderr)
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines().map(Result::unwrap);
        let screen: Vec<String> = lines.by_ref().take_while(|line| !line.starts_with("  curl")).collect();
        let first = screen.iter().find(|line| line.contains("serves config/demo.toml")).unwrap();
        // A Unix socket may stand behind it.
        let address = first.split("http://").nth(1).unwrap().split(" and ").next().unwrap().to_owned();
        // Dropping the pipe is fine: a server does not die of a reader who leaves.
        Self { process, address }
    }

    fn send(&self, request: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        stream
    }

    fn signal(&self, name: &str) {
        let pid = self.process.id().to_string();
        assert!(Command::new("kill").args([&format!("-{name}"), &pid]).status().unwrap().success());
    }
}

fn completion(max_tokens: u32) -> String {
    let body = format!(
        r#"{{"model": "rstitch", "prompt": "Q:", "max_tokens": {max_tokens}, "ignore_eos": true, "temperature": 0, "stream": true}}"#
    );
    let length = body.len();
    format!(
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
    )
}

#[test]
fn serving_and_draining() {
    let mut server = Server::start();
    let mut answer = String::new();
    server.send("GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");

    // A request that runs when the signal comes is answered to its end.
    let mut running = begun(server.send(&completion(200)));
    server.signal("TERM");
    let mut rest = String::new();
    running.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("\"finish_reason\":\"length\"") && rest.contains("data: [DONE]"), "{rest}");
    assert_eq!(server.process.wait().unwrap().code(), Some(0));
    assert!(TcpStream::connect(&server.address).is_err());
}

/// Lines up to the first event of a stream.
fn begun(stream: TcpStream) -> BufReader<TcpStream> {
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    while !line.starts_with("data: ") {
        line.clear();
        assert_ne!(stream.read_line(&mut line).unwrap(), 0, "no event came");
    }
    stream
}

#[test]
fn bug_72_a_signal_under_load_breaks_nothing_off() {
    let mut server = Server::start();
    let streams: Vec<TcpStream> = (0..64).map(|_| server.send(&completion(60))).collect();
    let streams: Vec<_> = streams.into_iter().map(begun).collect();
    server.signal("TERM");
    for mut stream in streams {
        let mut rest = String::new();
        stream.read_to_string(&mut rest).unwrap();
        assert!(rest.contains("\"finish_reason\":\"length\"") && rest.contains("data: [DONE]"), "{rest}");
    }
    assert_eq!(server.process.wait().unwrap().code(), Some(0));
}

/// A signal that comes while models are read ends the server as well.
#[test]
fn bug_72_a_signal_during_the_start() {
    let mut process = program()
        .args(["serve", "config/demo.toml", "--port", "0"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    // Its handler is in place when SIGTERM is among the signals that it catches.
    let pid = process.id();
    let caught = || {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap().trim().to_owned();
        u64::from_str_radix(&mask, 16).unwrap() & (1 << 14) != 0
    };
    while !caught() {
        assert!(process.try_wait().unwrap().is_none(), "the server ended by itself");
        std::thread::yield_now();
    }
    assert!(Command::new("kill").args(["-TERM", &pid.to_string()]).status().unwrap().success());
    assert_eq!(process.wait().unwrap().code(), Some(0));
}

#[test]
fn a_recording() {
    let dir = tempfile::tempdir().unwrap();
    let recordings = dir.path().join("recordings");
    let variables = [
        ("TOKENROUTER__RECORD__DIRECTORY", recordings.to_str().unwrap()),
        ("TOKENROUTER__RECORD__REQUESTS", "true"),
        ("TOKENROUTER__RECORD__ROUTES", "rstitch"),
    ];
    let mut server = Server::with(&variables, "warn", Stdio::null());
    let mut answer = String::new();
    server.send(&completion(30)).read_to_string(&mut answer).unwrap();
    assert!(answer.contains("data: [DONE]"), "{answer}");
    server.signal("TERM");
    assert_eq!(server.process.wait().unwrap().code(), Some(0));
    let run = recordings.join("run-00000");
    let manifest: Value = serde_json::from_slice(&std::fs::read(run.join("manifest.json")).unwrap()).unwrap();
    assert_eq!((&manifest["stopped"], &manifest["dropped_rows"]), (&"shutdown".into(), &0.into()));
    assert!(manifest["rows"].as_u64().unwrap() >= 30, "{manifest}");
    let line: Value = serde_json::from_slice(&std::fs::read(run.join("requests-00000.jsonl")).unwrap()).unwrap();
    assert_eq!((line["token_ids"].as_array().unwrap().len(), &line["end"]), (30, &"length".into()));

    // A directory that holds something else is refused before any model is read.
    std::fs::write(recordings.join("notes"), "").unwrap();
    for command in ["check", "serve"] {
        let output = program().args([command, "config/demo.toml"]).envs(variables).output().unwrap();
        let message = refusal(&output);
        assert!(message.contains("record.directory = ") && message.contains("holds \"notes\""), "{message}");
    }
}

#[test]
fn logs_that_nobody_reads() {
    // The third is a full pipe with a reader that never reads; its writers block.
    let (_reader, writer) = std::io::pipe().unwrap();
    let mut filler = writer.try_clone().unwrap();
    std::thread::spawn(move || while filler.write_all(&[b'.'; 512]).is_ok() {});
    for stderr in [broken_pipe(), full_disk(), writer.into()] {
        let mut server = Server::logging("trace", stderr);
        for _ in 0..3 {
            let mut answer = String::new();
            server.send(&completion(100)).read_to_string(&mut answer).unwrap();
            assert!(answer.contains("data: [DONE]"), "{answer}");
        }
        server.signal("TERM");
        assert_eq!(server.process.wait().unwrap().code(), Some(0));
    }
}

#[test]
fn a_second_signal_ends_at_once() {
    let mut server = Server::start();
    let mut running = BufReader::new(server.send(&completion(2000)));
    let mut line = String::new();
    running.read_line(&mut line).unwrap();
    server.signal("INT");
    // While it drains the server still answers, and says that it is going.
    let mut answer = String::new();
    while !answer.starts_with("HTTP/1.1 503") {
        answer.clear();
        server.send("GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").read_to_string(&mut answer).unwrap();
    }
    server.signal("INT");
    assert_eq!(server.process.wait().unwrap().code(), Some(1));
}

#[test]
fn what_a_server_is_told_by_its_door() {
    let dir = tempfile::tempdir().unwrap();
    let keys = dir.path().join("keys");
    std::fs::write(&keys, "# clients\nann 0123456789abcdef\n").unwrap();
    let (socket, notify) = (dir.path().join("s"), dir.path().join("n"));
    let systemd = std::os::unix::net::UnixDatagram::bind(&notify).unwrap();
    let told = || {
        let mut state = [0; 64];
        let length = systemd.recv(&mut state).unwrap();
        text(&state[..length])
    };
    let variables = [
        ("TOKENROUTER__SERVER__API_KEY_FILE", keys.to_str().unwrap()),
        ("TOKENROUTER__SERVER__UNIX_SOCKET", socket.to_str().unwrap()),
        ("TOKENROUTER__SERVER__DRAIN_GRACE_S", "86400"),
        ("NOTIFY_SOCKET", notify.to_str().unwrap()),
    ];
    let mut server = Server::with(&variables, "warn", Stdio::null());
    assert_eq!(told(), "READY=1");
    let ask = |path: &str, key: &str| {
        let mut stream = std::os::unix::net::UnixStream::connect(&socket).unwrap();
        let head = format!("GET {path} HTTP/1.1\r\nHost: x\r\nX-Api-Key: {key}\r\nConnection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer[9..12].to_owned()
    };
    assert_eq!(ask("/v1/models", "fedcba9876543210"), "401");
    assert_eq!(ask("/v1/models", "0123456789abcdef"), "200");
    // Keys are reloaded; a file that is wrong changes nothing.
    std::fs::write(&keys, "short").unwrap();
    server.signal("HUP");
    std::fs::write(&keys, "bob fedcba9876543210\n").unwrap();
    while ask("/v1/models", "fedcba9876543210") != "200" {
        server.signal("HUP");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    assert_eq!(ask("/v1/models", "0123456789abcdef"), "401");
    // Requests are still taken after the signal, while probes hear that it goes.
    server.signal("TERM");
    assert_eq!(told(), "STOPPING=1");
    while ask("/ready", "") != "503" {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    let request = completion(5).replace("Host: x", "Host: x\r\nX-Api-Key: fedcba9876543210");
    let mut answer = String::new();
    server.send(&request).read_to_string(&mut answer).unwrap();
    assert!(answer.contains("data: [DONE]"), "{answer}");
    server.signal("TERM");
    assert_eq!(server.process.wait().unwrap().code(), Some(1));
    assert!(!socket.exists());
}

#[test]
fn mistakes_at_the_door_show_before_models_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "short\n").unwrap();
    // Others may not read it, or that would be said as well.
    std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let path = file.to_str().unwrap();
    for (variable, message) in [
        ("TOKENROUTER__SERVER__API_KEY_FILE", "line 1: must be a string of 16 to 256 letters"),
        ("TOKENROUTER__SERVER__UNIX_SOCKET", "is not a socket; choose another path"),
    ] {
        let output = program().args(["serve", "config/demo.toml", "--port", "0"]).env(variable, path).output().unwrap();
        let refused = refusal(&output);
        assert!(refused.contains(message) && refused.contains(path) && !refused.contains("short"), "{refused}");
    }
    let (_dir, config) = copied(&format!("{ONE}[server.tls]\ncert = 'c.toml'\nkey = 'c.toml'\n"));
    for command in ["check", "serve"] {
        let refused = refusal(&run(&[command, &config]));
        assert!(refused.contains("server.tls.cert = ") && refused.ends_with("has no certificate; give a file in PEM"));
    }
}

#[test]
fn a_look_at_the_machine() {
    let output = run(&["doctor", "config/demo.toml", "--json"]);
    let seen: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&seen["version"], &seen["config"]["ok"]), (&env!("CARGO_PKG_VERSION").into(), &true.into()), "{seen}");
    assert!(seen["memory"]["total"].as_u64().is_some() && seen["cuda"]["devices"].is_array(), "{seen}");
    assert_eq!(output.status.code(), Some(i32::from(seen["faults"] != 0)), "{seen}");
    let output = run(&["doctor", "nowhere.toml"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stdout).contains("! config       nowhere.toml: there is no such file"));
}

#[test]
fn completions_for_shells() {
    for (shell, part) in
        [("bash", "complete -F _tokenrouter"), ("zsh", "#compdef tokenrouter"), ("fish", "-a \"doctor\"")]
    {
        let output = run(&["completions", shell]);
        assert_eq!(output.status.code(), Some(0));
        assert!(text(&output.stdout).contains(part), "{shell}");
    }
}

#[test]
fn the_readme_shows_what_works() {
    let readme = std::fs::read_to_string(root().join("README.md")).unwrap();
    // The plugin API's documentation tests compile this example.
    let documentation = std::fs::read_to_string(root().join("plugin-api/src/lib.rs")).unwrap();
    let example = documentation.split("//! ```\n").nth(1).unwrap();
    let example: String =
        example.lines().map(|line| line[3..].strip_prefix(' ').unwrap_or(&line[3..]).to_owned() + "\n").collect();
    assert!(readme.contains(&format!("```rust\n{example}```")), "README.md and the plugin API's example differ");
    let config = readme.split("```toml\n").nth(1).unwrap().split("```").next().unwrap();
    let (_dir, file) = copied(&config.replace("../models/demo", "DEMO"));
    assert_eq!(run(&["check", &file]).status.code(), Some(0));
}
