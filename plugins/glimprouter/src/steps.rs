//! Where the steps of an answer and its thinking end, found in the text as it is written. Pure.

/// What ends a step, and what ends the thinking.
#[derive(Clone, Debug, PartialEq)]
pub struct Rules {
    /// Text that ends a step. Not empty.
    pub delimiter: Vec<u8>,
    /// Text that ends the thinking. Not empty.
    pub thinking_end: Vec<u8>,
    /// Tokens after which a step ends without a delimiter. At least 1.
    pub max_step_tokens: u32,
    /// Tokens of the answer after which the thinking ends.
    pub token_budget: u32,
    /// Whether the thinking ends when a step, from the third on, has the text of the one before.
    pub stop_on_repeat: bool,
}

/// How far an answer has come.
///
/// A step ends with the token that completes the delimiter in the step's own text, whether the delimiter
/// spans tokens or lies inside one. The next step's text begins with the next token: what that token holds
/// behind the delimiter belongs to no step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Progress {
    tokens: usize,
    steps: u32,
    step_tokens: u32,
    /// Text of the step that is being written.
    step: Vec<u8>,
    /// Text of the step before, up to its delimiter.
    previous: Vec<u8>,
    thought: bool,
}

impl Progress {
    /// Tokens of the answer so far.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Complete steps so far.
    pub fn steps(&self) -> u32 {
        self.steps
    }

    /// Whether the next token is the first of a step of the thinking.
    pub fn at_step_start(&self) -> bool {
        self.step_tokens == 0 && !self.thought
    }

    /// Whether the thinking is over.
    pub fn thought(&self) -> bool {
        self.thought
    }

    /// The answer goes on with a token of this text.
    pub fn push(&mut self, rules: &Rules, text: &[u8]) {
        self.tokens += 1;
        if self.thought {
            return;
        }
        let new = self.step.len();
        self.step.extend_from_slice(text);
        self.step_tokens += 1;
        let delimiter = find_from(&self.step, &rules.delimiter, new);
        if find_from(&self.step, &rules.thinking_end, new).is_some() || self.tokens >= rules.token_budget as usize {
            self.end_thinking();
        } else if delimiter.is_some() || self.step_tokens >= rules.max_step_tokens {
            self.step.truncate(delimiter.unwrap_or(self.step.len()));
            self.end_step(rules);
        }
    }

    fn end_step(&mut self, rules: &Rules) {
        self.steps += 1;
        self.step_tokens = 0;
        if rules.stop_on_repeat && self.steps > 2 && self.step == self.previous {
            self.end_thinking();
        } else {
            std::mem::swap(&mut self.step, &mut self.previous);
            self.step.clear();
        }
    }

    /// The text is of no use from here on.
    fn end_thinking(&mut self) {
        self.thought = true;
        (self.step, self.previous) = (Vec::new(), Vec::new());
    }
}

/// Where `wanted` first occurs in `text`, given that it does not within the first `new` bytes.
fn find_from(text: &[u8], wanted: &[u8], new: usize) -> Option<usize> {
    let start = new.saturating_sub(wanted.len() - 1);
    text[start..].windows(wanted.len()).position(|window| window == wanted).map(|at| start + at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenrouter_plugin_api::random::uniform;

    fn rules() -> Rules {
        Rules {
            delimiter: b"\n\n".into(),
            thinking_end: b"</think>".into(),
            max_step_tokens: 512,
            token_budget: 8192,
            stop_on_repeat: true,
        }
    }

    fn progress(rules: &Rules, tokens: &[&str]) -> Progress {
        let mut progress = Progress::default();
        tokens.iter().for_each(|token| progress.push(rules, token.as_bytes()));
        progress
    }

    /// Indices of the tokens that end a step.
    fn step_ends(rules: &Rules, tokens: &[&str]) -> Vec<usize> {
        (0..tokens.len()).filter(|&i| progress(rules, &tokens[..=i]).at_step_start()).collect()
    }

    /// Index of the token with which the thinking ends.
    fn thinking_ends(rules: &Rules, tokens: &[&str]) -> Option<usize> {
        (0..tokens.len()).find(|&i| progress(rules, &tokens[..=i]).thought())
    }

    #[test]
    fn an_answer_begins_with_a_step() {
        assert!(Progress::default().at_step_start() && !Progress::default().thought());
    }

    #[test]
    fn delimiters_in_and_across_tokens() {
        for (tokens, ends) in [
            (&["a", "\n\n", "b"][..], &[1][..]),
            (&["a", ".\n\n", "b"], &[1]),
            (&["a", "\n\nThe", "b"], &[1]),
            (&["a\n", "\nThe", "b"], &[1]),
            (&["a", "\n", "", "\n", "b"], &[3]),
            (&["a\n", "b\n", " \n"], &[]),
            // What follows the delimiter in its token is no part of the next step.
            (&["a\n\n\n", "\n", "\n"], &[0, 2]),
            (&["\n\n", "\n", "\n\n", "\n"], &[0, 2]),
        ] {
            assert_eq!(step_ends(&rules(), tokens), ends, "{tokens:?}");
        }
        let long = Rules { delimiter: b"=-=-".into(), ..rules() };
        assert_eq!(step_ends(&long, &["=", "-=", "=-", "=", "-=-"]), [4]);
        assert_eq!(step_ends(&long, &["=-", "=", "-", "=-"]), [2]);
    }

    #[test]
    fn steps_are_cut_at_the_most_tokens() {
        let short = Rules { max_step_tokens: 3, ..rules() };
        assert_eq!(step_ends(&short, &["a", "b", "c", "d", "e\n\n", "f", "g", "h", "i"]), [2, 4, 7]);
        // A delimiter across the cut is none.
        assert_eq!(step_ends(&short, &["a", "b", "\n", "\n", "c"]), [2]);
        assert_eq!(progress(&short, &["a", "b", "c", "d"]).steps(), 1);
    }

    #[test]
    fn thinking_ends_in_and_across_tokens() {
        for (tokens, end) in [
            (&["a", "</think>", "b"][..], Some(1)),
            (&["a</", "thi", "nk>b", "c"], Some(2)),
            (&["a", "b\n\n</think>"], Some(1)),
            (&["</think>\n\n"], Some(0)),
            (&["</thin", "</think"], None),
            // Within one step only.
            (&["</th\n\n", "ink>"], None),
        ] {
            assert_eq!(thinking_ends(&rules(), tokens), end, "{tokens:?}");
        }
        let after = progress(&rules(), &["a", "</think>", "b\n\n"]);
        assert_eq!((after.tokens(), after.at_step_start(), after.thought()), (3, false, true));
    }

    #[test]
    fn the_token_budget_ends_thinking() {
        let rules = Rules { token_budget: 3, ..rules() };
        assert_eq!(thinking_ends(&rules, &["a", "b\n\n", "c", "d"]), Some(2));
        assert_eq!(thinking_ends(&rules, &["a", "b"]), None);
    }

    #[test]
    fn a_repeated_step_ends_thinking_from_the_third_on() {
        let tokens = ["a\n\n", "a\n\n", "a\n\n", "b"];
        assert_eq!(thinking_ends(&rules(), &tokens), Some(2));
        assert_eq!(thinking_ends(&Rules { stop_on_repeat: false, ..rules() }, &tokens), None);
        assert_eq!(thinking_ends(&rules(), &["a\n\n", "b\n\n", "a\n\n", "ab\n\n", "b\n\n"]), None);
        // Texts are compared, not tokens, and without delimiter and tail.
        assert_eq!(thinking_ends(&rules(), &["x\n\n", "ab", "c\n\n", "a", "bc\n\nd"]), Some(4));
    }

    /// The whole answer decoded from scratch: the same answers by another way.
    fn from_scratch(rules: &Rules, tokens: &[&[u8]]) -> (u32, bool, bool) {
        let text = |tokens: &[&[u8]]| String::from_utf8(tokens.concat()).unwrap();
        let [delimiter, end] = [&rules.delimiter, &rules.thinking_end].map(|b| std::str::from_utf8(b).unwrap());
        let (mut start, mut steps) = (0, Vec::<String>::new());
        for at in 1..=tokens.len() {
            let step = text(&tokens[start..at]);
            if step.contains(end) || at >= rules.token_budget as usize {
                return (steps.len() as u32, false, true);
            }
            if step.contains(delimiter) || at - start == rules.max_step_tokens as usize {
                steps.push(step.split(delimiter).next().unwrap().to_owned());
                start = at;
            }
            if rules.stop_on_repeat
                && at == start
                && steps.len() > 2
                && steps[steps.len() - 2] == steps[steps.len() - 1]
            {
                return (steps.len() as u32, false, true);
            }
        }
        (steps.len() as u32, start == tokens.len(), false)
    }

    #[test]
    fn any_split_of_any_text_agrees_with_decoding_it_from_scratch() {
        let pieces = ["\n", "\n", "\n", "a", "b", "</", "think>", "</think>", ".\n\n", " c "];
        let (mut repeats, mut ends) = (0, 0);
        for case in 0..3000 {
            let mut drawn = 0;
            let mut draw = |below: usize| {
                drawn += 1;
                (uniform(case, drawn, 1 << 20) * below as f64) as usize
            };
            let rules = Rules {
                max_step_tokens: [2, 7, 512][draw(3)],
                token_budget: [30, 8192][draw(2)],
                stop_on_repeat: draw(2) == 0,
                thinking_end: ["</think>", "b \n"][draw(2)].into(),
                ..rules()
            };
            let text: String = (0..draw(60)).map(|_| pieces[draw(pieces.len())]).collect();
            let (mut rest, mut tokens) = (text.as_bytes(), Vec::new());
            while !rest.is_empty() {
                let (token, behind) = rest.split_at(draw(5).min(rest.len()));
                tokens.push(token);
                rest = behind;
            }
            let mut progress = Progress::default();
            for at in 0..tokens.len() {
                progress.push(&rules, tokens[at]);
                let found = (progress.steps(), progress.at_step_start(), progress.thought());
                assert_eq!(found, from_scratch(&rules, &tokens[..=at]), "{rules:?} {:?}", &tokens[..=at]);
                assert_eq!(progress.tokens(), at + 1);
            }
            ends += u32::from(progress.thought());
            repeats += u32::from(progress.thought() && rules.stop_on_repeat && progress.steps() > 2);
        }
        assert!(ends > 300 && ends < 2900 && repeats > 50, "{ends} {repeats}");
    }
}
