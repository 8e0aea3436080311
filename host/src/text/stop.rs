//! Stop strings, found across token boundaries.

/// What a matcher made of a piece of text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stopped {
    /// Index of the stop string.
    pub stop: usize,
    /// Text that may be emitted before the end, the stop string included if asked for.
    pub text: String,
}

/// Finds the stop string that is complete first; of those complete at the same place, the longest.
///
/// The answer does not depend on how the text is cut into pieces. Only text that could still become a
/// stop string is held back.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: Vec<String>,
    include: bool,
    held: String,
}

impl StopMatcher {
    /// Empty stop strings are ignored. `include` keeps the stop string in the text.
    pub fn new(stops: Vec<String>, include: bool) -> Self {
        Self { stops, include, held: String::new() }
    }

    /// The stop string at `index`.
    pub fn stop(&self, index: usize) -> Option<&str> {
        self.stops.get(index).map(String::as_str)
    }

    /// Take `piece`. `Ok` is text to emit now. While not `effective`, a stop string that is complete in
    /// this piece does not count; one that begins in it and is complete later does.
    pub fn push(&mut self, piece: &str, effective: bool) -> Result<String, Stopped> {
        let before = self.held.len();
        self.held.push_str(piece);
        if effective && let Some((stop, end)) = self.first_end(before) {
            let keep = if self.include { end } else { end - self.stops[stop].len() };
            self.held.truncate(keep);
            return Err(Stopped { stop, text: std::mem::take(&mut self.held) });
        }
        let hold = self.held.len() - self.longest_prefix_at_end();
        let rest = self.held.split_off(hold);
        Ok(std::mem::replace(&mut self.held, rest))
    }

    /// The end was reached: text held back.
    pub fn flush(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// The first place after `before` where a stop string ends.
    fn first_end(&self, before: usize) -> Option<(usize, usize)> {
        let ends = self.held[before..].char_indices().map(|(at, c)| before + at + c.len_utf8());
        for end in ends {
            let text = &self.held[..end];
            let complete = self.stops.iter().enumerate().filter(|(_, s)| !s.is_empty() && text.ends_with(s.as_str()));
            if let Some((stop, _)) = complete.max_by_key(|(index, s)| (s.len(), std::cmp::Reverse(*index))) {
                return Some((stop, end));
            }
        }
        None
    }

    /// Bytes at the end that begin a stop string without being all of it.
    fn longest_prefix_at_end(&self) -> usize {
        let begins = |stop: &String| {
            let longest = stop.len().saturating_sub(1).min(self.held.len());
            (1..=longest)
                .rev()
                .find(|&n| stop.is_char_boundary(n) && self.held.as_bytes().ends_with(&stop.as_bytes()[..n]))
        };
        self.stops.iter().filter_map(begins).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Feed `pieces`, effective from piece number `from` on; all text and the stop that ended it.
    fn run(pieces: &[&str], stops: &[&str], include: bool, from: usize) -> (String, Option<usize>) {
        let mut matcher = StopMatcher::new(stops.iter().map(|s| s.to_string()).collect(), include);
        let mut text = String::new();
        for (index, piece) in pieces.iter().enumerate() {
            match matcher.push(piece, index >= from) {
                Ok(more) => text.push_str(&more),
                Err(stopped) => return (text + &stopped.text, Some(stopped.stop)),
            }
        }
        (text + &matcher.flush(), None)
    }

    /// The same by looking at the whole text so far after each character.
    fn naive(pieces: &[&str], stops: &[&str], include: bool, from: usize) -> (String, Option<usize>) {
        let mut text = String::new();
        for (index, piece) in pieces.iter().enumerate() {
            for c in piece.chars() {
                text.push(c);
                let longest = stops.iter().enumerate().filter(|(_, s)| text.ends_with(**s)).map(|(i, s)| (s.len(), i));
                if index >= from
                    && let Some((length, stop)) = longest.max_by_key(|&(n, i)| (n, std::cmp::Reverse(i)))
                {
                    let end = if include { text.len() } else { text.len() - length };
                    return (text[..end].to_owned(), Some(stop));
                }
            }
        }
        (text, None)
    }

    #[test]
    fn never_emits_the_start_of_a_stop() {
        let mut matcher = StopMatcher::new(vec!["DEFGHIJ".into()], false);
        assert_eq!(matcher.push("ABC", true).unwrap(), "ABC");
        assert_eq!(matcher.push("DEF", true).unwrap(), "");
        assert_eq!(matcher.push("GHIJ", true), Err(Stopped { stop: 0, text: String::new() }));
    }

    #[test]
    fn gives_back_what_did_not_become_a_stop() {
        let mut matcher = StopMatcher::new(vec!["DUE TRE X".into()], false);
        assert_eq!(matcher.push("UNO DUE TRE", true).unwrap(), "UNO ");
        assert_eq!(matcher.flush(), "DUE TRE");
    }

    #[test]
    fn holds_only_prefixes() {
        let mut matcher = StopMatcher::new(vec!["\n\n".into()], false);
        assert_eq!(matcher.push("a\n", true).unwrap(), "a");
        assert_eq!(matcher.push("b", true).unwrap(), "\nb");
    }

    #[test]
    fn a_stop_that_is_complete_too_early_does_not_count() {
        assert_eq!(run(&["x.", "y", "z."], &["."], false, 2), ("x.yz".into(), Some(0)));
        assert_eq!(run(&["a", "b", "c"], &["abc"], false, 2), (String::new(), Some(0)));
    }

    proptest! {
        #[test]
        fn agrees_with_a_naive_search(
            pieces in proptest::collection::vec("[ab가😀]{0,4}", 0..12),
            stops in proptest::collection::vec("[ab가😀]{1,4}", 0..4),
            include: bool,
            from in 0usize..4,
        ) {
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            prop_assert_eq!(run(&pieces, &stops, include, from), naive(&pieces, &stops, include, from));
        }
    }
}
