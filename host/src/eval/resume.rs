//! Finished questions in a file of JSON lines, so that an evaluation that was broken off can go on.
//!
//! The first line holds a digest of all that decides the answers; rows of another evaluation are never
//! taken for this one's.

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::summary::Row;

/// Collects what decides the answers.
#[derive(Clone, Default)]
pub struct Digest(Sha256);

impl Digest {
    /// Add a part. Lengths go in too: no two lists of parts give the same bytes.
    pub fn add(&mut self, name: &str, part: &[u8]) {
        for piece in [name.as_bytes(), part] {
            self.0.update((piece.len() as u64).to_le_bytes());
            self.0.update(piece);
        }
    }

    /// In hexadecimal.
    pub fn finish(self) -> String {
        self.0.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

#[derive(Serialize, Deserialize)]
struct Header {
    tokenrouter_eval: String,
    digest: String,
}

/// What a file holds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Kept {
    pub rows: Vec<Row>,
    /// Bytes of whole lines; what follows was being written when the evaluation ended.
    pub bytes: usize,
}

/// The first line.
pub fn header(digest: &str) -> Result<String, serde_json::Error> {
    line(&Header { tokenrouter_eval: env!("CARGO_PKG_VERSION").into(), digest: digest.into() })
}

/// A line for one row.
pub fn row(row: &Row) -> Result<String, serde_json::Error> {
    line(row)
}

fn line(value: &impl Serialize) -> Result<String, serde_json::Error> {
    Ok(serde_json::to_string(value)? + "\n")
}

/// Read `bytes` of the evaluation with this digest. A last line without its end is left out, and a file
/// without a whole first line is empty. The error says what to do; `file` is its name.
pub fn read(bytes: &[u8], digest: &str, file: &str) -> Result<Kept, String> {
    let Some(end) = bytes.iter().rposition(|byte| *byte == b'\n') else { return Ok(Kept::default()) };
    let advice = "delete it, or start anew with --restart";
    let mut lines = bytes[..end].split(|byte| *byte == b'\n');
    let header: Header = serde_json::from_slice(lines.next().unwrap_or_default())
        .map_err(|_| format!("{file}: line 1 is not of an evaluation that was broken off; {advice}"))?;
    // Without answers nothing is lost: the other evaluation was refused or broken off at its start.
    if header.digest != digest && lines.clone().next().is_none() {
        return Ok(Kept::default());
    }
    if header.digest != digest {
        return Err(format!(
            "{file} is of another evaluation (configuration, models, routers, plugins, dataset, points, sampling or \
             version differ); {advice}"
        ));
    }
    let rows = (2..).zip(lines).map(|(number, line)| {
        serde_json::from_slice(line).map_err(|e| format!("{file}: line {number} is damaged ({e}); {advice}"))
    });
    Ok(Kept { rows: rows.collect::<Result<_, _>>()?, bytes: end + 1 })
}

#[cfg(test)]
mod tests {
    use super::super::summary::tests::{point, row as a_row};
    use super::*;

    fn file() -> (String, Vec<Row>) {
        let point = point("r", "threshold=0.5", &["small", "large"]);
        let mut rows = vec![a_row(&point, 0, true, &[3, 1], 2), a_row(&point, 7, false, &[5, 0], 0)];
        rows[1].found = None;
        rows[1].text = "two\nlines ☃".into();
        rows[1].seconds = 0.1 + 0.2;
        let lines = rows.iter().map(|r| row(r).unwrap());
        (header("abc").unwrap() + &lines.collect::<String>(), rows)
    }

    #[test]
    fn comes_back_as_it_was() {
        let (text, rows) = file();
        assert_eq!(text.lines().count(), 3);
        assert_eq!(read(text.as_bytes(), "abc", "f"), Ok(Kept { rows, bytes: text.len() }));
    }

    #[test]
    fn a_torn_line_is_left_out() {
        let (text, rows) = file();
        let second: usize = text.lines().take(2).map(|line| line.len() + 1).sum();
        for cut in 0..text.len() {
            let kept = read(&text.as_bytes()[..cut], "abc", "f").unwrap();
            let whole = text.as_bytes()[..cut].iter().filter(|byte| **byte == b'\n').count();
            assert_eq!(kept.rows, rows[..whole.saturating_sub(1)], "{cut}");
            assert!(kept.bytes <= cut);
            if whole == 2 {
                assert_eq!(kept.bytes, second);
            }
        }
    }

    #[test]
    fn of_another_evaluation_or_damaged() {
        let (text, _) = file();
        let error = read(text.as_bytes(), "abd", "f").unwrap_err();
        assert!(error.starts_with("f is of another evaluation") && error.ends_with("--restart"), "{error}");
        assert_eq!(read(header("abc").unwrap().as_bytes(), "abd", "f"), Ok(Kept::default()));
        let error = read(b"{}\n", "abc", "f").unwrap_err();
        assert!(error.starts_with("f: line 1 is not of an evaluation"), "{error}");
        let error = read((header("abc").unwrap() + "{\"index\":\n{}\n").as_bytes(), "abc", "f").unwrap_err();
        assert!(error.starts_with("f: line 2 is damaged"), "{error}");
    }

    #[test]
    fn digests_tell_parts_apart() {
        let of = |parts: &[(&str, &str)]| {
            let mut digest = Digest::default();
            parts.iter().for_each(|(name, part)| digest.add(name, part.as_bytes()));
            digest.finish()
        };
        assert_eq!(of(&[("a", "b")]), of(&[("a", "b")]));
        assert_ne!(of(&[("a", "b")]), of(&[("ab", "")]));
        assert_ne!(of(&[("a", "b"), ("c", "")]), of(&[("a", "bc"), ("", "")]));
        assert_eq!(of(&[]).len(), 64);
    }
}
