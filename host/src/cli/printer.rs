//! An answer in the terminal, each token in the colour of the model that wrote it. Pure.

/// Foreground colours in the order of a route's models: told apart on dark and on light grounds.
const COLOURS: [&str; 6] = ["36", "33", "35", "32", "34", "31"];

/// What is written to the terminal, piece by piece.
#[derive(Debug)]
pub struct Printer {
    /// Names of the route's models.
    names: Vec<String>,
    terminal: bool,
    coloured: bool,
    /// The model whose colour is on.
    current: Option<usize>,
    tokens: Vec<usize>,
}

impl Printer {
    /// `terminal`: control characters are shown, not sent. `coloured`: with colours.
    pub fn new(names: Vec<String>, terminal: bool, coloured: bool) -> Self {
        let tokens = vec![0; names.len()];
        Self { names, terminal, coloured, current: None, tokens }
    }

    fn colour(&self, model: usize) -> String {
        format!("\x1b[{}m", COLOURS[model % COLOURS.len()])
    }

    /// What to write for one token of `model` that completed `text` (maybe nothing yet).
    pub fn token(&mut self, model: usize, text: &str) -> String {
        if let Some(count) = self.tokens.get_mut(model) {
            *count += 1;
        }
        if text.is_empty() {
            return String::new();
        }
        let text = if self.terminal { shown(text) } else { text.into() };
        if !self.coloured || self.current == Some(model) {
            return text;
        }
        self.current = Some(model);
        self.colour(model) + &text
    }

    /// What to write after the last token: held back `text`, and the terminal as it was before.
    pub fn end(&mut self, text: &str) -> String {
        let text = if self.terminal { shown(text) } else { text.into() };
        let reset = if self.current.take().is_some() { "\x1b[0m" } else { "" };
        format!("{text}{reset}")
    }

    /// Which colour is whose, and how many tokens each model wrote.
    pub fn legend(&self, handoffs: u32, finish: &str) -> String {
        let total: usize = self.tokens.iter().sum();
        let models: Vec<String> = self
            .names
            .iter()
            .zip(&self.tokens)
            .enumerate()
            .map(|(i, (name, tokens))| {
                let share = 100.0 * *tokens as f64 / total.max(1) as f64;
                let name = if self.coloured { format!("{}{name}\x1b[0m", self.colour(i)) } else { name.clone() };
                format!("{name} {tokens} ({share:.0} %)")
            })
            .collect();
        let plural = if handoffs == 1 { "" } else { "s" };
        format!("{total} tokens: {} · {handoffs} hand-off{plural} · {finish}", models.join(", "))
    }
}

/// Control characters as pictures: a model's text must not steer the terminal.
fn shown(text: &str) -> String {
    text.chars()
        .map(|c| match c {
            '\n' | '\t' => c,
            '\0'..='\x1f' => char::from_u32(0x2400 + u32::from(c)).unwrap_or('\u{fffd}'),
            '\x7f' => '\u{2421}',
            '\u{80}'..='\u{9f}' => '\u{fffd}',
            c => c,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printer(coloured: bool) -> Printer {
        Printer::new(vec!["small".into(), "large".into()], coloured, coloured)
    }

    #[test]
    fn colours_change_with_the_model() {
        let mut printer = printer(true);
        let written = [
            printer.token(0, "17 *"),
            printer.token(0, " 24 = "),
            printer.token(1, ""),
            printer.token(1, "408"),
            printer.token(0, "."),
            printer.end("\u{fffd}"),
        ];
        assert_eq!(written.concat(), "\x1b[36m17 * 24 = \x1b[33m408\x1b[36m.\u{fffd}\x1b[0m");
        let legend = "5 tokens: \x1b[36msmall\x1b[0m 3 (60 %), \x1b[33mlarge\x1b[0m 2 (40 %) · 2 hand-offs · stop";
        assert_eq!(printer.legend(2, "stop"), legend);
        assert_eq!(printer.end(""), "");
    }

    #[test]
    fn plain_text_is_exact() {
        let mut printer = printer(false);
        assert_eq!(printer.token(0, "a\x1b[1m\r\n") + &printer.token(1, "b") + &printer.end(""), "a\x1b[1m\r\nb");
        assert_eq!(printer.legend(1, "length"), "2 tokens: small 1 (50 %), large 1 (50 %) · 1 hand-off · length");
    }

    #[test]
    fn a_terminal_is_not_steered() {
        let mut printer = printer(true);
        assert_eq!(printer.token(0, "\x1b]0;x\x07\u{9b}1m\n\t\x7f"), "\x1b[36m␛]0;x␇\u{fffd}1m\n\t␡");
    }

    #[test]
    fn nothing_written() {
        assert_eq!(printer(false).legend(0, "stop"), "0 tokens: small 0 (0 %), large 0 (0 %) · 0 hand-offs · stop");
    }
}
