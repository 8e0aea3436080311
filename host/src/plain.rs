//! Words of others in messages of ours.

/// `text` on one line: its control characters as escapes, so that nothing in it ends the line or moves a
/// cursor.
pub(crate) fn plain(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() { plain.extend(c.escape_default()) } else { plain.push(c) }
    }
    plain
}

/// As much of `text` as a message quotes.
pub(crate) fn short(text: &str) -> String {
    const MOST: usize = 60;
    match text.chars().nth(MOST) {
        Some(_) => text.chars().take(MOST - 1).chain(['…']).collect(),
        None => text.to_owned(),
    }
}

/// Of `known`, the one that `word` was probably meant to be.
pub(crate) fn closest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let limit = word.chars().count().div_ceil(3).min(3);
    known.into_iter().map(|k| (distance(word, k), k)).filter(|(d, _)| *d <= limit).min_by_key(|(d, _)| *d).map(|p| p.1)
}

/// `did you mean …?` or, with nothing close, all that is known.
pub(crate) fn suggestion<'a>(word: &str, known: impl IntoIterator<Item = &'a str> + Clone) -> String {
    match closest(word, known.clone()) {
        Some(near) => format!("did you mean `{near}`?"),
        None => {
            let known: Vec<&str> = known.into_iter().collect();
            if known.is_empty() { "there are none".into() } else { format!("known are {}", known.join(", ")) }
        }
    }
}

/// Edit distance with swaps of neighbours as one edit.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut before: Vec<usize> = Vec::new();
    let mut last: Vec<usize> = (0..=b.len()).collect();
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let mut best = (last[j] + 1).min(row[j - 1] + 1).min(last[j - 1] + usize::from(a[i - 1] != b[j - 1]));
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                best = best.min(before[j - 2] + 1);
            }
            row.push(best);
        }
        before = std::mem::replace(&mut last, row);
    }
    last[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped_and_nothing_else() {
        assert_eq!(plain("a\nb\u{1b}[2J \u{85}\u{7f} \"한\\"), "a\\nb\\u{1b}[2J \\u{85}\\u{7f} \"한\\");
    }

    #[test]
    fn near_words() {
        assert_eq!(distance("prot", "port"), 1);
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(closest("min_bacth", ["min_batch", "max_rows"]), Some("min_batch"));
        assert_eq!(closest("colour", ["port", "host"]), None);
        assert_eq!(suggestion("colour", ["port", "host"]), "known are port, host");
        assert_eq!(suggestion("x", []), "there are none");
    }
}
