//! What `check` says of configurations, policies and models.

use super::*;

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
    let module = wat::parse_str(include_str!("../../../plugins/rstitch/rstitch.wat")).unwrap();
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
    assert!(last.starts_with("error: ") && last.contains("c.toml:4: the models need "), "{error}");
}

#[test]
fn refused_configurations() {
    for (config, message) in [
        ("[server]\nprot = 1\n", "c.toml:2: unknown key `server.prot`: did you mean `port`?"),
        (
            "[models.m]\npath = 'nowhere/at/all'\n",
            "c.toml:2: models.m.path = \"nowhere/at/all\": there is no directory ",
        ),
        ("[models.m]\npath = 'model'\ncontext = 9999\n", "c.toml:3: models.m.context = 9999: the model's own is 2048"),
        (
            "[models.m]\npath = 'model'\nkv_memory = '1KiB'\n",
            "c.toml:3: models.m.kv_memory: the K/V pool has no room for one page ",
        ),
        ("[models.m]\npath = 'model'\n[server]\ntls.cert = 'none'\ntls.key = 'none'\n", "c.toml:4: server.tls.cert = "),
        (
            "[models.m]\npath = 'model'\n[server]\napi_key_file = 'none'\n",
            "c.toml:4: server.api_key_file = \"none\": cannot be read",
        ),
        ("[models.m]\npath = 'model'\ndevice = 'cuda:1023'\n", "c.toml:3: models.m.device = \"cuda:1023\": "),
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
        (
            "plugin = 'rstitch'",
            "c.toml:6: route `r`, model `m`: policy `rstitch` refuses to start: rstitch needs exactly",
        ),
        (
            "plugin = 'rstitch'\noverrides = [\n'treshold']",
            "c.toml:9: routes.r.overrides[0] = \"treshold\": is not in the settings schema of plugin `rstitch`; did you \
             mean `threshold`? It names ",
        ),
        (
            "plugin = 'rstitch'\n[routes.r.nets.a]\nfile = 'f'\nnodes = [\n{ op = 'x' }]",
            "c.toml:11: routes.r.nets.a.nodes[0]",
        ),
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
    assert!(refused.contains("models.m.masked_tokens[0] = \"<|nothing|>\": the model has no such token"), "{refused}");
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
    for part in ["c.toml:7: routes.r: ", "`m` and `n`", "<|im_other|>", "<|im_start|>"] {
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
