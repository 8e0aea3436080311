//! The corpora through their targets: as they are, and changed a little. The same changes every time.

use std::path::{Path, PathBuf};

use tokenrouter_plugin_api::random::philox;

/// Numbers that lengths, counts and offsets are put to.
const ODD: [u64; 8] = [0, 1, 0x7f, 0x80, 0xff, 0x7fff_ffff, u32::MAX as u64, u64::MAX];

fn corpus(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target)
}

/// Run `target` on its corpus, then on `changed` changes of it.
fn replay(name: &str, target: fn(&[u8]), changed: u32) {
    let mut files: Vec<PathBuf> = std::fs::read_dir(corpus(name)).unwrap().map(|e| e.unwrap().path()).collect();
    files.sort();
    let corpus: Vec<Vec<u8>> = files.iter().map(|file| std::fs::read(file).unwrap()).collect();
    assert!(!corpus.is_empty(), "{name} has no corpus");
    let named = files.iter().map(|file| file.display().to_string());
    let named = named.chain((0..changed).map(|number| format!("change {number}")));
    let inputs = corpus.iter().cloned().chain((0..changed).map(|number| change(&corpus, number)));
    let broken: Vec<String> = named
        .zip(inputs)
        .filter(|(_, bytes)| std::panic::catch_unwind(|| target(bytes)).is_err())
        .map(|(name, bytes)| format!("{name}: b\"{}\"", bytes.escape_ascii()))
        .collect();
    let first = broken.iter().take(3).map(String::as_str).collect::<Vec<_>>().join("\n");
    assert!(broken.is_empty(), "{} inputs break a promise of {name}, among them\n{first}", broken.len());
}

/// Change number `number` of a corpus.
fn change(corpus: &[Vec<u8>], number: u32) -> Vec<u8> {
    let mut drawn = 0;
    let mut draw = |below: usize| {
        drawn += 1;
        philox([number, drawn], [0; 4])[0] as usize % below.max(1)
    };
    let mut bytes = corpus[draw(corpus.len())].clone();
    for _ in 0..=draw(4) {
        let at = draw(bytes.len() + 1);
        let end = (at + 1 + draw(16)).min(bytes.len());
        match draw(7) {
            0 if at < bytes.len() => bytes[at] ^= 1 << draw(8),
            1 if at < bytes.len() => bytes[at] = draw(256) as u8,
            2 => {
                let number = ODD[draw(ODD.len())].to_le_bytes();
                let width = [1, 2, 4, 8][draw(4)].min(bytes.len() - at);
                bytes[at..at + width].copy_from_slice(&number[..width]);
            }
            3 => drop(bytes.drain(at..end)),
            4 => {
                let part = bytes[at..end].to_vec();
                bytes.splice(at..at, part);
            }
            5 => {
                // The rest of another one.
                let other = &corpus[draw(corpus.len())];
                bytes.truncate(at);
                bytes.extend_from_slice(&other[draw(other.len() + 1)..]);
            }
            _ => bytes.insert(at, b"\0\n\"\\{}[],=-0129.e\x1b\xff"[draw(19)]),
        }
    }
    bytes
}

/// One test for each target, with its number of changes.
macro_rules! targets {
    ($($name:ident $changed:literal)*) => {
        $(
            #[test]
            fn $name() {
                replay(stringify!($name), super::$name, $changed);
            }
        )*

        /// Every target has a file for `cargo-fuzz`, and every file of it a target here.
        #[test]
        fn every_target_is_replayed() {
            let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/fuzz_targets");
            let files = std::fs::read_dir(directory).unwrap();
            let mut files: Vec<String> = files.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
            files.sort();
            let mut names = [$(concat!(stringify!($name), ".rs")),*];
            names.sort_unstable();
            assert_eq!(files, names);
        }
    };
}

targets! {
    chat_template 3000
    config_toml 3000
    elf_gate 3000
    http_body 2000
    model_config 3000
    net_description 2000
    nets_toml 2000
    plan_toml 3000
    replay_answer 1500
    replay_recording 1500
    safetensors_nets 1500
    structured_form 400
    text_tokens 1000
    torch_file 1500
    torch_pickle 1500
    trace_files 3000
    wasm_loader 200
    wasm_manifest 1500
    wat_text 300
}
