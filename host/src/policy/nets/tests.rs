use std::collections::BTreeMap;
use std::path::PathBuf;

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use tokenrouter_plugin_api::net::{Net as Description, Op as Described};

use super::*;
use crate::runner::net::Op;

fn model(hidden_size: u32) -> ModelInfo {
    ModelInfo {
        name: "small".into(),
        description: String::new(),
        vocab_size: 50,
        hidden_size,
        context: 64,
        eos: vec![],
        pages: 4,
        weight_bytes: 0,
        page_bytes: 0,
    }
}

/// A safetensors file of f32 tensors with the numbers 0, 1, 2, …
fn file(directory: &Path, tensors: &[(&str, &[usize])]) -> PathBuf {
    let data: BTreeMap<&str, Vec<u8>> = tensors
        .iter()
        .map(|(name, shape)| {
            (*name, (0..shape.iter().product()).flat_map(|i: usize| (i as f32).to_le_bytes()).collect())
        })
        .collect();
    let views = tensors
        .iter()
        .map(|(name, shape)| (*name, TensorView::new(Dtype::F32, shape.to_vec(), &data[name]).expect("a tensor")));
    let path = directory.join("w.safetensors");
    safetensors::serialize_to_file(views, None, &path).expect("a file");
    path
}

fn demo(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo/routers").join(path)
}

#[test]
fn a_batch_norm_is_folded() {
    let directory = tempfile::tempdir().unwrap();
    let shapes: &[(&str, &[usize])] = &[
        ("l.weight", &[2, 3]),
        ("l.bias", &[2]),
        ("n.weight", &[2]),
        ("n.bias", &[2]),
        ("n.running_mean", &[2]),
        ("n.running_var", &[2]),
    ];
    file(directory.path(), shapes);
    let mut net = Description::new("n", "w.safetensors");
    let x = net.hidden();
    let x = net.linear(x, "l");
    net.batch_norm(x, "n");
    let built = load("test", &net, directory.path(), &model(3)).unwrap();
    assert_eq!((built.nodes.len(), built.width()), (2, 2));
    let Op::Linear { weight, bias } = &built.nodes[1].op else { panic!("{built:?}") };
    // Gain, shift, mean and variance of the second output are all 1; the first one's gain is 0.
    let scale = 1.0 / (1.0f64 + 1e-5).sqrt();
    let want: Vec<f32> = [0.0, 0.0, 0.0, 3.0, 4.0, 5.0].iter().map(|w| (w * scale) as f32).collect();
    assert_eq!((weight, bias), (&want, &vec![0.0, 1.0]));

    net.push(Described::Add, &[x, 2]);
    let error = load("test", &net, directory.path(), &model(3)).unwrap_err();
    assert!(error.contains("read by another node too"), "{error}");
}

#[test]
fn a_router_of_another_model_is_refused_with_both_sizes() {
    let directory = tempfile::tempdir().unwrap();
    file(directory.path(), &[("l.weight", &[1, 210]), ("l.bias", &[1])]);
    let mut net = Description::new("router", "w.safetensors");
    let parts = [net.hidden(), net.token_embedding(), net.top_logits(10)];
    let x = net.concat(&parts);
    net.linear(x, "l");
    assert!(load("r2r", &net, directory.path(), &model(100)).is_ok());
    assert_eq!(
        load("r2r", &net, directory.path(), &model(64)).unwrap_err(),
        "net `router` of r2r: node 4 (Linear { weight: \"l.weight\", bias: Some(\"l.bias\") }): `l.weight` [1, 210] of \
         w.safetensors takes 210 numbers, but gets 138 (concatenation [138]: hidden state [64] + token embedding [64] + \
         top logits [10]); model `small` has hidden size 64: use the router that was trained for it"
    );
}

#[test]
fn descriptions_without_sense_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    file(directory.path(), &[("m", &[3, 4]), ("v", &[4]), ("wide.weight", &[65, 4])]);
    let linear = |weight: &str| Described::Linear { weight: weight.into(), bias: None };
    let hidden = || (Described::Hidden { back: 0 }, vec![]);
    type Nodes = Vec<(Described, Vec<u32>)>;
    let cases: Vec<(Nodes, &str)> = vec![
        (vec![], "has 0 nodes; give 1 to 4096"),
        (vec![(Described::Gelu, vec![0])], "reads node 0, which does not come before it"),
        (vec![(Described::Gelu, vec![])], "has 0 inputs; give 1 to 1"),
        (vec![hidden(), (Described::Hidden { back: 0 }, vec![0])], "has 1 inputs; give 0 to 0"),
        (vec![hidden(), hidden()], "the value of hidden state [4] is not used"),
        (vec![hidden(), (linear("none"), vec![0])], "w.safetensors has no tensor `none`"),
        (vec![hidden(), (linear("v"), vec![0])], "`v` of w.safetensors has shape [4], but a matrix is needed"),
        (vec![hidden(), (linear("wide.weight"), vec![0])], "its score has 65 numbers; the most is 64"),
        (vec![(Described::TopLogits { count: 51, back: 0 }, vec![])], "asks for 51 of 50 tokens"),
        (vec![(Described::TopLogits { count: 0, back: 0 }, vec![])], "asks for 0 of 50 tokens"),
        (vec![(Described::Hidden { back: 16 }, vec![])], "looks 16 positions back; the most is 15"),
        (vec![(Described::Row { tensor: "m".into(), row: 3 }, vec![])], "the tensor has 3 rows"),
        (
            vec![(Described::Embedding { weight: "m".into() }, vec![])],
            "has a row for 3 tokens, but model `small` has 50",
        ),
        (
            vec![hidden(), (linear("m"), vec![0]), (Described::Add, vec![0, 1])],
            "cannot add hidden state [4] and linear layer [3]",
        ),
        (
            vec![hidden(), (Described::RmsNorm { weight: "v".into(), eps: f32::NAN }, vec![0])],
            "has eps NaN; give a number above 0",
        ),
    ];
    for (nodes, want) in cases {
        let mut net = Description::new("n", "w.safetensors");
        for (op, inputs) in nodes {
            net.push(op, &inputs);
        }
        let error = load("test", &net, directory.path(), &model(4)).unwrap_err();
        assert!(error.contains(want), "{error}\n  should contain: {want}");
    }
}

#[test]
fn both_layouts_of_the_demo_routers_hold_the_same() {
    for (a, b) in [("r2r/router.safetensors", "r2r/router.pt"), ("citer/router.safetensors", "citer/router.pth")] {
        let (mut a, mut b) = (WeightsFile::open(&demo(a)).unwrap(), WeightsFile::open(&demo(b)).unwrap());
        let info = a.info();
        assert_eq!(info.tensors, b.info().tensors);
        for tensor in info.tensors.iter().filter(|t| !t.name.ends_with("num_batches_tracked")) {
            assert_eq!(a.read(&tensor.name), b.read(&tensor.name), "{}", tensor.name);
        }
    }
    let metadata = |path| -> serde_json::Value {
        serde_json::from_str(&WeightsFile::open(&demo(path)).unwrap().info().metadata).unwrap()
    };
    let (sibling, inside) = (metadata("r2r/router.safetensors"), metadata("r2r/router.pt"));
    for key in ["model_type", "init_args", "common_args"] {
        assert_eq!(sibling[key], inside[key], "{key}");
    }
}

#[test]
fn files_that_are_no_weights_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| {
        let path = directory.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    };
    let error = |path: &Path| WeightsFile::open(path).err().unwrap();
    assert!(error(&directory.path().join("none.pt")).contains("does not exist; give a .safetensors, .pt or .pth file"));
    assert!(error(directory.path()).contains("is no file"));
    assert!(error(&write("w.bin.gz", b"x")).contains("has an unknown kind"));
    assert!(error(&write("old.pt", b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.")).contains("is no zip archive"));
    assert!(error(&write("w.safetensors", b"short")).contains("is no safetensors file (5 bytes)"));
    let whole = std::fs::read(demo("citer/router.pth")).unwrap();
    for length in [whole.len() / 3, whole.len() - 30] {
        assert!(WeightsFile::open(&write("cut.pt", &whole[..length])).is_err(), "{length} bytes were enough");
    }
    std::fs::copy(demo("citer/router.safetensors"), directory.path().join("c.safetensors")).unwrap();
    write("c.json", b"[1]");
    assert!(error(&directory.path().join("c.safetensors")).contains("is no JSON object"));
}

/// Any byte of a checkpoint may be wrong: reading it fails or gives numbers, and never panics.
#[test]
fn damaged_checkpoints_do_not_panic() {
    let directory = tempfile::tempdir().unwrap();
    let whole = std::fs::read(demo("citer/router.pth")).unwrap();
    // The pickle comes first, the zip directory last: the numbers between them mean nothing.
    let places = (0..1200).step_by(7).chain((whole.len() - 1500..whole.len()).step_by(11));
    let mut refused = 0;
    for place in places {
        let mut bytes = whole.clone();
        bytes[place] ^= 0x5a;
        let path = directory.path().join("damaged.pt");
        std::fs::write(&path, bytes).unwrap();
        match WeightsFile::open(&path) {
            Ok(mut file) => {
                let names: Vec<String> = file.info().tensors.into_iter().map(|t| t.name).collect();
                refused += usize::from(names.iter().any(|name| file.read(name).is_err()));
            }
            Err(_) => refused += 1,
        }
    }
    assert!(refused > 50, "only {refused} were noticed");
}

/// A checkpoint with this pickle and one storage of 16 bytes.
fn checkpoint(directory: &Path, pickle: &[u8]) -> PathBuf {
    use std::io::Write;
    let path = directory.join("made.pt");
    let mut archive = zip::ZipWriter::new(std::fs::File::create(&path).unwrap());
    let stored = zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
    for (name, bytes) in [("a/data.pkl", pickle), ("a/data/0", &[0u8; 16])] {
        archive.start_file(name, stored).unwrap();
        archive.write_all(bytes).unwrap();
    }
    archive.finish().unwrap();
    path
}

/// `{name: tensor}` of f32, the shape and the length of the storage as they are claimed.
fn tensor(length: i64, shape: &[i64], strides: &[i64]) -> Vec<u8> {
    let long = |n: i64| [vec![0x8a, 8], n.to_le_bytes().to_vec()].concat();
    let tuple = |items: &[i64]| [vec![b'('], items.iter().flat_map(|&n| long(n)).collect(), vec![b't']].concat();
    let text = |t: &str| [vec![0x8c, t.len() as u8], t.as_bytes().to_vec()].concat();
    let storage = [
        vec![b'('],
        text("storage"),
        b"ctorch\nFloatStorage\n".to_vec(),
        text("0"),
        text("cpu"),
        long(length),
        b"tQ".to_vec(),
    ];
    [
        b"\x80\x02}".to_vec(),
        text("w"),
        b"ctorch._utils\n_rebuild_tensor_v2\n(".to_vec(),
        storage.concat(),
        long(0),
        tuple(shape),
        tuple(strides),
        b"tRs.".to_vec(),
    ]
    .concat()
}

#[test]
fn claims_of_a_checkpoint_are_checked_before_memory_is_taken() {
    let directory = tempfile::tempdir().unwrap();
    let mut honest = WeightsFile::open(&checkpoint(directory.path(), &tensor(4, &[2, 2], &[2, 1]))).unwrap();
    assert_eq!(honest.read("w"), Ok(vec![0.0; 4]));
    for (length, shape, strides) in [
        (1 << 62, vec![1 << 62], vec![1]),
        (i64::MAX, vec![1 << 61, 2], vec![2, 1]),
        (100, vec![25, 4], vec![4, 1]),
        (4, vec![0, 1 << 40, 1 << 40], vec![1 << 40, 1 << 40, 1]),
        (4, vec![4, 4], vec![0, 1]),
        (-1, vec![4], vec![1]),
    ] {
        let path = checkpoint(directory.path(), &tensor(length, &shape, &strides));
        let read = WeightsFile::open(&path).and_then(|mut file| file.read("w"));
        // A tensor without numbers may have any other sizes.
        assert!(!read.as_ref().is_ok_and(|n| !n.is_empty()), "{shape:?}: {read:?}");
    }
}

#[test]
fn shared_values_do_not_multiply() {
    let directory = tempfile::tempdir().unwrap();
    // {"state_dict": {}, "x": a list of a long text, ten thousand times the same}
    let mut pickle = b"\x80\x02}(\x8c\nstate_dict}\x8c\x01x](".to_vec();
    pickle.extend([vec![b'X'], 100_000u32.to_le_bytes().to_vec(), vec![b'a'; 100_000], b"q\x00".to_vec()].concat());
    pickle.extend(b"h\x00".repeat(10_000));
    pickle.extend(b"eu.");
    let error = WeightsFile::open(&checkpoint(directory.path(), &pickle)).err().unwrap();
    assert!(error.contains("its metadata would have more than 4194304 bytes"), "{error}");
    // Each list holds the one before it twice.
    let mut pickle = b"\x80\x02}(\x8c\nstate_dict}\x8c\x01x]q\x00".to_vec();
    for i in 0..40u8 {
        pickle.extend([b'0', b']', b'(', b'h', i, b'h', i, b'e', b'q', i + 1]);
    }
    pickle.extend(b"u.");
    let error = WeightsFile::open(&checkpoint(directory.path(), &pickle)).err().unwrap();
    assert!(error.contains("its metadata"), "{error}");
}

/// Uses of a value cost a few bytes of a pickle, whatever the value takes.
#[test]
fn what_is_used_often_is_small() {
    let directory = tempfile::tempdir().unwrap();
    let text =
        |bytes: usize, key: u8| [&b"X"[..], &(bytes as u32).to_le_bytes(), &vec![b'a'; bytes], &[b'q', key]].concat();
    // Globals of a long name.
    let mut globals = [b"\x80\x02".to_vec(), text(1 << 20, 0), text(1, 1)].concat();
    globals.extend(b"h\x00h\x01\x93".repeat(100_000));
    globals.push(b'.');
    // Tensors of one shape, which has a million dimensions, or of one name, storage and number of entries.
    let tensors = |name: usize, storage: usize, dimensions: usize, entries: usize| {
        let mut pickle = [&b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n("[..]].concat();
        pickle.extend(b"(\x8c\x07storagectorch\nFloatStorage\n");
        pickle.extend(text(storage, 9));
        pickle.extend(b"\x8c\x03cpuK\x01tQK\x00(");
        pickle.extend(b"K\x01".repeat(dimensions));
        pickle.extend(b"tq\x01h\x01tRq\x02}(");
        pickle.extend(text(name, 3));
        pickle.extend(b"h\x02");
        pickle.extend(b"h\x03h\x02".repeat(entries - 1));
        pickle.extend(b"u.");
        pickle
    };
    let opened = WeightsFile::open(&checkpoint(directory.path(), &tensors(3, 1, 2, 2))).unwrap();
    assert_eq!(opened.shape("aaa"), Some(&[1, 1][..]));
    for (pickle, refused) in [
        (globals, "the name of a global has more than 256 bytes"),
        (tensors(1025, 1, 2, 1), "a tensor's name has 1025 bytes; the most is 1024"),
        (tensors(3, 65, 2, 1), "its storage is not described as torch.save does"),
        (tensors(3, 1, 17, 1), "has 17 dimensions; the most is 16"),
        (tensors(3, 1, 1 << 19, 1000), "has 524288 dimensions; the most is 16"),
        (tensors(3, 1, 2, 65537), "its state dictionary has 65537 entries; the most is 65536"),
    ] {
        let error = WeightsFile::open(&checkpoint(directory.path(), &pickle)).err().unwrap();
        assert!(error.contains(refused), "{error}");
    }
}

/// A sparse file may be larger than all memory, and have a tensor as large.
#[test]
fn what_no_memory_holds_is_not_read() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("w.safetensors");
    let bytes = (1u64 << 33) * 4;
    let header = format!(r#"{{"t":{{"dtype":"F32","shape":[65536,131072],"data_offsets":[0,{bytes}]}}}}"#);
    std::fs::write(&path, header_alone(&header)).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(file.metadata().unwrap().len() + bytes).unwrap();
    let error = WeightsFile::open(&path).unwrap().read("t").unwrap_err();
    assert!(error.contains("shape [65536, 131072] has more than 4294967296 numbers"), "{error}");
}

/// The bytes of a safetensors file with this header and no numbers.
fn header_alone(header: &str) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat()
}

#[test]
fn sizes_that_add_up_to_all_that_a_number_holds_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("w.safetensors");
    let each = (1u64 << 61) - 1;
    let tensor = |i: u64| {
        format!(r#""t{i}":{{"dtype":"U8","shape":[{each}],"data_offsets":[{},{}]}}"#, i * each, (i + 1) * each)
    };
    let header = format!("{{{}}}", (0..8).map(tensor).collect::<Vec<_>>().join(","));
    std::fs::write(&path, header_alone(&header)).unwrap();
    let error = WeightsFile::open(&path).err().unwrap();
    assert!(error.contains("it is cut off or damaged"), "{error}");
}

#[test]
fn words_of_a_weights_file_stay_on_one_line() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("w.safetensors");
    for (header, part) in [
        (
            r#"{"a\u001b[2J":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#,
            r#"name "a\u{1b}[2J" has control characters"#,
        ),
        (r#"{"a":{"dtype":"\n","shape":[0],"data_offsets":[0,0]}}"#, r"unknown variant `\n`"),
    ] {
        std::fs::write(&path, header_alone(header)).unwrap();
        let error = WeightsFile::open(&path).err().unwrap();
        assert!(error.contains(part) && !error.contains(char::is_control), "{error}");
    }
}
