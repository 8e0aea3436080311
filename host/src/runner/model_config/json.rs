//! Reading JSON files with messages that name the key at fault.

use std::path::Path;

use super::LoadError;

/// `None` when there is no such file.
pub(crate) fn read_json<T: serde::de::DeserializeOwned>(file: &Path) -> Result<Option<T>, LoadError> {
    let text = match std::fs::read(file) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(LoadError::new(file, format!("cannot be read: {e}"))),
    };
    parse_json(&text).map(Some).map_err(|e| LoadError::new(file, format!("{e}; download the file again")))
}

/// An object. The message of an error names the key at fault.
pub(super) fn parse_json<T: serde::de::DeserializeOwned>(text: &[u8]) -> Result<T, String> {
    // A struct could be read from a list too, and complaints would then be about its length.
    if text.trim_ascii_start().first().is_some_and(|first| *first != b'{') {
        return Err("is no JSON object ({…})".into());
    }
    let mut json = serde_json::Deserializer::from_slice(text);
    let value = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let key = error.path().to_string();
        // The library names types of the program; these are the words for people.
        let problem = ["usize", "u32", "f64", "a sequence", "a map"]
            .into_iter()
            .zip(["a whole number from 0", "a whole number from 0", "a number", "a list", "an object"])
            .fold(error.inner().to_string(), |text, (from, to)| {
                text.replace(&format!("expected {from}"), &format!("expected {to}"))
            });
        if key == "." { format!("is not what was expected ({problem})") } else { format!("`{key}`: {problem}") }
    })?;
    json.end().map_err(|e| format!("has more after the JSON object ({e})"))?;
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::super::Raw;
    use super::super::ends::RawGeneration;
    use super::parse_json;

    #[test]
    fn keys_stay_on_one_line() {
        let error = super::super::ModelConfig::from_json(b"{\"a\\tb\x7f\": @}", None).unwrap_err().to_string();
        assert!(error.starts_with(r"config.json: `a\tb\u{7f}`: expected value"), "{error}");
    }

    #[test]
    fn errors_of_json_name_the_key() {
        let error = |text: &str| parse_json::<Raw>(text.as_bytes()).err().unwrap();
        for (text, parts) in [
            ("[]", &["no JSON object"][..]),
            ("{\"hidden_size\": \"x\"}", &["`hidden_size`: ", "expected a whole number from 0 at line 1"]),
            ("{\"hidden_size\": -1}", &["`hidden_size`: ", "`-1`"]),
            ("{\"rms_norm_eps\": null}", &["`rms_norm_eps`: ", "expected a number"]),
            (
                "{\"eos_token_id\": -1}",
                &["`eos_token_id`: expected a token id (a whole number from 0) or a list of them"],
            ),
            ("{\"rope_scaling\": 3}", &["`rope_scaling`: ", "expected an object"]),
            ("{\"rope_scaling\": {\"factor\": []}}", &["`rope_scaling.factor`: ", "expected a number"]),
            ("{", &["EOF"]),
            ("{}", &["missing field `vocab_size`"]),
        ] {
            let error = error(text);
            assert!(parts.iter().all(|part| error.contains(part)), "{text}: {error}");
        }
        assert!(parse_json::<RawGeneration>(b"{} x").is_err_and(|e| e.contains("more after")));
    }
}
