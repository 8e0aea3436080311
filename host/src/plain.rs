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

#[cfg(test)]
mod tests {
    #[test]
    fn control_characters_are_escaped_and_nothing_else() {
        assert_eq!(super::plain("a\nb\u{1b}[2J \u{85}\u{7f} \"한\\"), "a\\nb\\u{1b}[2J \\u{85}\\u{7f} \"한\\");
    }
}
