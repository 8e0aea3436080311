//! A module with a router network, from a configuration to an answer.

use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::{built, program, root, text};

/// CITER as a module, whose net the route describes.
const CITER: &str = r#"(module
    (@custom "tokenrouter:policy"
      "{\"abi\": 1, \"name\": \"citer-wasm\", \"version\": \"1\", \"roles\": [\"slm\", \"llm\"], \"nets\": [\"confidence\"],"
      " \"settings\": {\"threshold\": {\"type\": \"number\"}}}")
    (memory (export "memory") 1)
    (global (export "tr_block") i32 (i32.const 0))
    (func (export "tr_route") (param $rows i32) (result i32) (local $at i32)
      (loop $next
        ;; At the large model the score is NaN, and below nothing.
        (if (f64.lt (f64.promote_f32 (f32.load offset=0x3400 (local.get $at))) (f64.load (i32.const 0x100)))
          (then
            (i32.store offset=0x400 (local.get $at) (i32.const 2))
            (i32.store offset=0x800 (local.get $at) (i32.const 0x80000001))))
        (local.set $at (i32.add (local.get $at) (i32.const 4)))
        (br_if $next (i32.lt_u (local.get $at) (i32.mul (local.get $rows) (i32.const 4)))))
      (local.get $rows)))"#;

/// A configuration with CITER as a library and as the module `citer.wat`, with `nodes` before the score.
fn citer_twice(directory: &Path, end: &str) -> String {
    std::fs::write(directory.join("citer.wat"), CITER).unwrap();
    let (demo, library) = (root().join("models/demo").canonicalize().unwrap(), built("libciter.so"));
    let demo = demo.display();
    let text = format!(
        r#"
[models.small]
path = "{demo}/small"
kv_memory = "64MiB"
[models.large]
path = "{demo}/large"
kv_memory = "128MiB"
[routes.native]
plugin = "{library}"
roles = {{ small = "slm", large = "llm" }}
settings = {{ router = "{demo}/routers/citer/router.safetensors", threshold = 0.98 }}
[routes.module]
plugin = "./citer.wat"
roles = {{ small = "slm", large = "llm" }}
settings = {{ threshold = 0.98 }}
[routes.module.nets.confidence]
file = "{demo}/routers/citer/router.safetensors"
at = "slm"
nodes = [
  {{ op = "hidden" }},
  {{ op = "linear", prefix = "mlp.0" }},
  {{ op = "batch_norm", prefix = "mlp.1" }},
  {{ op = "relu" }},
  {{ op = "linear", prefix = "mlp.4" }},
  {end}
]
"#
    );
    let file = directory.join("config.toml").display().to_string();
    std::fs::write(&file, text).unwrap();
    file
}

#[test]
fn a_module_with_a_net_decides_as_the_library() {
    let directory = tempfile::tempdir().unwrap();
    let run = |arguments: &[&str]| {
        let mut command = Command::new(program());
        command.current_dir(root()).stdin(Stdio::null()).env_remove("RUST_LOG").args(arguments).output().unwrap()
    };
    let config = citer_twice(directory.path(), r#"{ op = "linear", prefix = "linear" }, { op = "sigmoid" },"#);
    let answer = |route: &str| -> Value {
        let prompt = "A set has 23 stamps for 30 dollars each. Albert orders 8 sets. What is the price?";
        let output = run(&["generate", &config, "--route", route, "--prompt", prompt, "--max-tokens", "60", "--json"]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(answer["usage"]["tokens_by_model"]["large"].as_u64().unwrap() > 0, "{}", answer["usage"]);
        answer
    };
    let written = |answer: &Value| -> Vec<(Value, Value)> {
        answer["tokens"].as_array().unwrap().iter().map(|t| (t["id"].clone(), t["model"].clone())).collect()
    };
    let (native, module) = (answer("native"), answer("module"));
    assert_eq!(written(&native), written(&module));
    let scores = |answer: &Value, name: &str| -> Vec<Value> {
        answer["tokens"].as_array().unwrap().iter().map(|token| token["signals"][name].clone()).collect()
    };
    assert_eq!(scores(&native, "net_citer"), scores(&module, "net_confidence"));
    // Without models: a net whose score is no single number, and a field that an operation does not take.
    let error = |config: &str| {
        let output = run(&["check", config]);
        assert_eq!(output.status.code(), Some(2));
        text(&output.stderr)
    };
    let wide = citer_twice(directory.path(), r#"{ op = "top_k", count = 2 }"#);
    let message = error(&wide);
    let refused = "routes.module.nets.confidence: scores 2 numbers a row; let its last node score 1";
    assert!(message.contains(refused), "{message}");
    let wrong = citer_twice(directory.path(), r#"{ op = "linear", prefix = "linear", count = 3 }"#);
    let message = error(&wrong);
    assert!(message.contains("routes.module.nets.confidence.nodes[5]: linear takes no `count`"), "{message}");
    assert!(message.contains("config.toml:"), "{message}");
}
