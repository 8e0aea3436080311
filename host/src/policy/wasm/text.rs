//! WebAssembly text: translated in memory, then as any module.

use std::path::Path;

use super::gate;

/// Largest text. Modules of the largest size come from texts of about this one.
pub const MAX_BYTES: u64 = 256 << 10;

#[derive(Debug, PartialEq, thiserror::Error)]
pub enum TextError {
    #[error("is not text in UTF-8 ({0}); name a translated module with the ending .wasm")]
    NotText(std::str::Utf8Error),
    #[error("is not WebAssembly text ({0}); correct it there")]
    Syntax(String),
    #[error("translates to {found} bytes, more than the {} allowed; write a smaller policy", gate::MAX_BYTES)]
    TooLarge { found: usize },
}

/// Whether the name says that it is text.
pub fn is_text(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "wat")
}

/// The module that `text` describes; it has passed no check.
pub fn translate(text: &[u8]) -> Result<Vec<u8>, TextError> {
    let text = std::str::from_utf8(text).map_err(TextError::NotText)?;
    let module = wat::parse_str(text).map_err(|e| TextError::Syntax(one_line(&e.to_string())))?;
    match module.len() {
        found if found as u64 > gate::MAX_BYTES => Err(TextError::TooLarge { found }),
        _ => Ok(module),
    }
}

/// What is wrong and where, without the picture of the line.
fn one_line(error: &str) -> String {
    let what = error.lines().next().unwrap_or_default();
    let place = error.lines().find_map(|line| line.trim_start().strip_prefix("--> <anon>:"));
    let place = place.and_then(|place| place.split_once(':'));
    let place = place.map_or_else(String::new, |(line, column)| format!(", line {line}, column {column}"));
    what.chars().take(200).flat_map(char::escape_debug).chain(place.chars()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_that_is_too_large_has_no_debug_information() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("p.wat");
        std::fs::write(&path, " ".repeat(MAX_BYTES as usize + 1)).unwrap();
        let error = super::super::WasmPlugin::read(&path).unwrap_err().to_string();
        assert!(error.starts_with("has 262145 bytes, more than the 262144 allowed; write a smaller policy"), "{error}");
    }

    #[test]
    fn text_becomes_a_module() {
        assert_eq!(translate(b";; nothing\n(module)"), Ok(b"\0asm\x01\0\0\0".to_vec()));
        let error = |text: &[u8]| translate(text).unwrap_err().to_string();
        assert_eq!(
            error(b"(module\n  (func (nop)\n  (x)))"),
            "is not WebAssembly text (unknown operator or unexpected token, line 3, column 4); correct it there"
        );
        assert!(error(b"\0asm\xff").starts_with("is not text in UTF-8 (invalid utf-8 sequence"));
        let long = format!("(module (memory 2) (data (i32.const 0) \"{}\"))", "x".repeat(66_000));
        assert!(error(long.as_bytes()).starts_with("translates to 660"), "{}", error(long.as_bytes()));
        assert!(error("(".repeat(100_000).as_bytes()).starts_with("is not WebAssembly text ("));
    }
}
