//! The reference traces of the demo family, token for token and writer for writer.

use serde_json::Value;

use super::host::{Request, Texts, pair};

fn read(path: &str) -> Value {
    let path = format!("{}/../../{path}", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// The byte that a character of a byte-level vocabulary stands for: printable Latin-1 for itself, the
/// others, in order, from U+0100 on.
fn byte(char: char) -> u8 {
    let printable = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let code = u32::from(char);
    if code < 256 { code as u8 } else { (0..=255).filter(|b| !printable(b)).nth(code as usize - 256).unwrap() }
}

fn demo_texts() -> Texts {
    let tokenizer = read("models/demo/small/tokenizer.json");
    let mut texts = vec![None; 2048];
    for (token, id) in tokenizer["model"]["vocab"].as_object().unwrap() {
        texts[id.as_u64().unwrap() as usize] = Some(token.chars().map(byte).collect());
    }
    for token in tokenizer["added_tokens"].as_array().unwrap() {
        texts[token["id"].as_u64().unwrap() as usize] = Some(token["content"].as_str().unwrap().into());
    }
    Texts(texts)
}

#[test]
fn reference_traces() {
    let texts = demo_texts();
    for (i, changes) in [(1, true), (2, true), (3, false)] {
        let trace = read(&format!("tests/fixtures/goldens/traces/glimprouter-{i}.json"));
        let ids = |name: &str| -> Vec<u32> {
            trace[name].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
        };
        let steps = trace["steps"].as_array().unwrap();
        let sample = |position: usize, model: usize| {
            let name = ["small", "large"][model];
            let evaluations = steps[position]["evaluations"].as_array().unwrap();
            let evaluation = evaluations.iter().find(|e| e["model"] == name);
            let evaluation = evaluation.unwrap_or_else(|| panic!("trace {i} does not ask {name} at {position}"));
            (evaluation["candidate"].as_u64().unwrap() as u32, evaluation["entropy_top20"].as_f64().unwrap())
        };
        let mut policies = pair(&texts, &format!(r#"{{"threshold": {}}}"#, trace["parameter"]));
        let prompt = ids("prompt_ids");
        let mut request = Request::new(&mut policies, [0, 0], &prompt);
        for _ in steps {
            request.write(&mut policies, sample);
        }
        assert_eq!(request.tokens[prompt.len()..], ids("token_ids"), "trace {i}");
        let writers: Vec<_> = request.writers.iter().map(|&model| ["small", "large"][model]).collect();
        assert_eq!(serde_json::json!(writers), trace["models"], "trace {i}");
        assert_eq!(writers.windows(2).any(|pair| pair[0] != pair[1]), changes, "trace {i}");
    }
}
