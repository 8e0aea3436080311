//! Models, their devices and where they are found.

use super::*;

#[test]
fn messages_about_models() {
    let fault = |line: &str| error(&format!("[models.m]\npath = 'm'\n{line}\n"));
    for (line, message) in [
        ("pth = 1", "unknown key `models.m.pth`: did you mean `path`?"),
        (
            "device = 'tpu'",
            "models.m.device = \"tpu\": must be \"auto\", \"cpu\", \"cuda\", or \"cuda:N\" with the number of the device",
        ),
        (
            "device = 'cuda:+1'",
            "models.m.device = \"cuda:+1\": must be \"auto\", \"cpu\", \"cuda\", or \"cuda:N\" with the number of the device",
        ),
        ("dtype = 'f16'", "models.m.dtype = \"f16\": must be \"auto\", \"bf16\" or \"f32\""),
        (
            "dtype = 'bf16'\ndevice = 'cpu'",
            "models.m.dtype = \"bf16\": the CPU computes in f32; use \"f32\" or \"auto\", or device = \"cuda\"",
        ),
        (
            "shape = 'qwen3-8b'",
            "models.m.shape = \"qwen3-8b\": `path` gives the weights already; keep `path`, or `shape` with `tokenizer`",
        ),
        (
            "tokenizer = 't'",
            "models.m.tokenizer = \"t\": goes with `shape`; a model with a `path` has the tokenizer of that directory",
        ),
        ("min_batch = 0", "models.m.min_batch = 0: must be from 1 to 4096"),
        ("min_batch = []", "models.m.min_batch = []: must have at least one step, for example [1, 2, 2, 3]"),
        ("min_batch = [1, 0]", "models.m.min_batch[1] = 0: must be from 1 to 4096"),
        ("min_batch = [1, 3]", "models.m.min_batch[1] = 3: with 2 active requests a batch of 3 never fills; at most 2"),
        ("min_batch = true", "models.m.min_batch = true: must be an integer, not a boolean"),
        ("hold_ms = -1", "models.m.hold_ms = -1: must be from 0 to 60000"),
        ("max_wait_ms = -0.5", "models.m.max_wait_ms = -0.5: must be from 0 to 60000"),
        ("pages = 0", "models.m.pages = 0: must be from 1 to 1073741824"),
        (
            "kv_memory = '512'",
            "models.m.kv_memory = \"512\": must be a size with its unit, for example \"512MiB\" or \"2GiB\"",
        ),
        ("kv_memory = '0MiB'", "models.m.kv_memory = \"0MiB\": must be from 1B to 1000TB"),
        ("kv_memory = '9000TiB'", "models.m.kv_memory = \"9000TiB\": must be from 1B to 1000TB"),
        (
            "min_batch = [1, 99999999999999999999]",
            "models.m.min_batch[1] = 99999999999999999999: must be from 1 to 4096",
        ),
        ("kv_memory = 512", "models.m.kv_memory = 512: must be a string, not an integer"),
        ("max_rows = 0", "models.m.max_rows = 0: must be from 1 to 65536"),
        ("multiprocessors = 0", "models.m.multiprocessors = 0: must be from 1 to 1024"),
        ("context = 0", "models.m.context = 0: must be from 1 to 1073741824"),
        ("path = 'again'", "not valid TOML: `path` is given twice; leave one of them"),
    ] {
        assert_eq!(fault(line), format!("dir/t.toml:3: {message}"));
    }
    assert_eq!(
        fault("device = 'cpu'\nmultiprocessors = 16"),
        "dir/t.toml:4: models.m.multiprocessors = 16: the CPU has none; use device = \"cuda\", or leave it out"
    );
    assert_eq!(
        fault("max_rows = 8\nprefill_chunk = 9"),
        "dir/t.toml:4: models.m.prefill_chunk = 9: must not be above max_rows (8)"
    );
    assert_eq!(
        fault("pages = 8\nkv_tokens = 9"),
        "dir/t.toml:4: models.m.kv_tokens = 9: `pages` gives the size of the K/V pool already; keep one of them"
    );
    assert_eq!(
        error("\n[models.m]\ndevice = 'cpu'"),
        "dir/t.toml:2: [models.m]: has no `path`; add `path = \"DIRECTORY\"` or `path = \"ORG/NAME\"`"
    );
    assert_eq!(error(""), "dir/t.toml: no model is configured; add a table [models.NAME] with `path = \"DIRECTORY\"`");
    assert_eq!(error("models.a = 1"), "dir/t.toml:1: models.a = 1: must be a table, not an integer");
    assert_eq!(
        error("[models.'a b']\npath = 'x'"),
        "dir/t.toml:1: [models.\"a b\"]: a name has 1 to 128 letters, digits or - _ . : / @ + and nothing else"
    );
    assert_eq!(error("[model.a]\npath = 'x'"), "dir/t.toml:1: unknown key `model`: did you mean `models`?");
}

#[test]
fn devices_and_shapes() {
    for (device, choice) in
        [("cuda", DeviceChoice::Cuda(0)), ("cuda:3", DeviceChoice::Cuda(3)), ("auto", DeviceChoice::Auto)]
    {
        let text = format!("[models.m]\nshape = 'qwen3-32b'\ntokenizer = 't'\ndtype = 'f32'\ndevice = '{device}'\n");
        let model = &parse(&text).unwrap().models[0];
        assert_eq!((model.device, model.dtype, model.path.as_str()), (choice, DtypeChoice::F32, "t"));
        let Weights::Random(shape) = model.weights else { panic!("{:?}", model.weights) };
        assert_eq!(shape.name, "qwen3-32b");
    }
    let shaped = |line: &str| error(&format!("[models.m]\ntokenizer = 't'\n{line}\n"));
    assert_eq!(
        shaped("shape = 'qwen3-33b'"),
        "dir/t.toml:3: models.m.shape = \"qwen3-33b\": is not a known shape: did you mean `qwen3-32b`?"
    );
    assert!(shaped("shape = 'gpt'").contains("is not a known shape: known are qwen3-0.6b, qwen3-1.7b, "));
    assert_eq!(
        shaped("shape = 'qwen3-8b'\ndevice = 'cpu'"),
        "dir/t.toml:4: models.m.device = \"cpu\": a model with random weights (`shape`) runs on CUDA only; use device = \"cuda\""
    );
    assert_eq!(
        error("[models.m]\nshape = 'qwen3-8b'"),
        "dir/t.toml:2: models.m.shape = \"qwen3-8b\": needs a tokenizer; add `tokenizer = \"DIRECTORY\"` with a tokenizer.json"
    );
}

#[test]
fn faults_of_models_are_at_their_keys() {
    let text = "[models.m]\nshape = 'qwen3-32b'\ntokenizer = 't'\nkv_memory = '1GiB'\nmasked_tokens = [\n'a',\n'b']\n\
                [models.'m.n/o']\npath = 'n'\ncontext = 9\n";
    let variables = [("TOKENROUTER__MODELS__M__DTYPE", "bf16")];
    let config = parse_with(text, &variables).unwrap();
    for (model, message, line) in [
        (0, "models.m.tokenizer = \"t\": is not there", "dir/t.toml:3: "),
        (0, "models.m.kv_memory: too small", "dir/t.toml:4: "),
        (0, "models.m.max_rows: not written", "dir/t.toml:1: "),
        (0, "models.m: config.json is not there", "dir/t.toml:2: "),
        (0, "models.m.dtype = \"bf16\": no", "environment variable TOKENROUTER__MODELS__M__DTYPE: "),
        (1, "models.m.n/o.context = 9: too large", "dir/t.toml:10: "),
        (1, "models.m.n/o: config.json is not there", "dir/t.toml:9: "),
    ] {
        let told = config.model_error(&config.models[model], message).to_string();
        assert_eq!(told, format!("{line}{message}"));
    }
    let second = config.model_error_at(&config.models[0], "masked_tokens/1", "no");
    assert_eq!(second.origin, Some(Origin::Line(7)));
}

#[test]
fn models_are_found() {
    let dir = tempfile::tempdir().unwrap();
    let at = |p: &str| dir.path().join(p);
    let cache = HubCache::from_env(|name| (name == "HF_HOME").then(|| at("hf")));
    let find = |path: &str| {
        let text = format!("[models.m]\npath = {path:?}\n");
        let config = Config::parse(&text, &at("conf/c.toml"), &BTreeMap::new()).unwrap();
        model_directory(&config, &config.models[0], &cache).map_err(|e| e.to_string())
    };
    std::fs::create_dir_all(at("conf/here/model")).unwrap();
    std::fs::write(at("conf/file"), "").unwrap();
    assert_eq!(find("here/model").unwrap(), at("conf/here/model"));
    let shown = |p: &str| at(p).display().to_string();
    assert_eq!(
        find("../not/there").unwrap_err(),
        format!(
            "{}:2: models.m.path = \"../not/there\": there is no directory {}; paths are relative to the configuration file",
            shown("conf/c.toml"),
            shown("conf/../not/there")
        )
    );
    assert!(find("file").unwrap_err().ends_with("is not a directory; give the directory that holds it"));
    assert_eq!(
        find("Org/Name").unwrap_err(),
        format!(
            "{}:2: models.m.path = \"Org/Name\": neither the directory {} nor {} in the hub cache exists; get it with `hf download Org/Name`",
            shown("conf/c.toml"),
            shown("conf/Org/Name"),
            shown("hf/hub/models--Org--Name")
        )
    );
    let snapshot = at("hf/hub/models--Org--Name/snapshots/abc123");
    std::fs::create_dir_all(&snapshot).unwrap();
    std::fs::create_dir_all(at("hf/hub/models--Org--Name/refs")).unwrap();
    std::fs::write(at("hf/hub/models--Org--Name/refs/main"), "abc123\n").unwrap();
    assert_eq!(find("Org/Name").unwrap(), snapshot);
}

#[test]
fn where_the_hub_cache_is() {
    let cache = |set: &'static [(&str, &str)]| {
        HubCache::from_env(|name| set.iter().find(|(n, _)| *n == name).map(|(_, v)| v.into()))
    };
    assert_eq!(cache(&[("HF_HUB_CACHE", "/c"), ("HF_HOME", "/h")]), HubCache("/c".into()));
    assert_eq!(cache(&[("HF_HOME", "/h"), ("HOME", "/u")]), HubCache("/h/hub".into()));
    assert_eq!(cache(&[("HF_HOME", ""), ("HOME", "/u")]), HubCache("/u/.cache/huggingface/hub".into()));
}
