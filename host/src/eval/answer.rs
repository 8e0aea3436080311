//! The answer in a text, and whether it is the right one.

use regex::Regex;

/// How the answer is found in a text.
#[derive(Clone, Debug)]
pub enum AnswerRule {
    /// What follows the last `Answer:` on its line; in a text without one, the last number.
    Usual { line: Regex, number: Regex },
    /// The first group of the last match.
    Pattern(Regex),
}

impl AnswerRule {
    /// The usual rule, or `pattern`: a regular expression with one group.
    pub fn new(pattern: Option<&str>) -> Result<Self, String> {
        let Some(pattern) = pattern else {
            let compile = |pattern: &str| Regex::new(pattern).map_err(|e| e.to_string());
            return Ok(Self::Usual {
                line: compile(r"(?im)\banswer:[ \t]*(\S.*?)\s*$")?,
                number: compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")?,
            });
        };
        let regex = Regex::new(pattern).map_err(|e| {
            // The library draws the place below the pattern; one line names the fault.
            let text = e.to_string();
            let fault = text.lines().last().unwrap_or_default().trim().trim_start_matches("error: ");
            format!("{pattern:?} is not a regular expression: {fault}")
        })?;
        match regex.captures_len() - 1 {
            1 => Ok(Self::Pattern(regex)),
            groups => Err(format!(
                "{pattern:?} has {groups} groups; it needs one, around the answer: \"Answer: (\\d+)\" \
                 (a group that is none of the answer is written (?:…))"
            )),
        }
    }

    /// The answer in `text`, trimmed, if there is one.
    pub fn find(&self, text: &str) -> Option<String> {
        let last = |regex: &Regex| Some(regex.captures_iter(text).last()?.get(1)?.as_str().trim().to_owned());
        match self {
            Self::Pattern(regex) => last(regex),
            Self::Usual { line, number } => last(line).or_else(|| {
                let found = number.find_iter(text).last()?;
                // After a digit or a letter it is a minus or a hyphen, not a sign.
                let within = text[..found.start()].ends_with(|c: char| c.is_alphanumeric());
                let unsigned = if within { found.as_str().trim_start_matches(['-', '+']) } else { found.as_str() };
                Some(unsigned.to_owned())
            }),
        }
    }
}

/// Whether `found` is the answer `right`: equal after trimming or, when both are numbers, in value.
/// `1,234` and `1234.0` are the same number.
pub fn is_right(found: &str, right: &str) -> bool {
    let (found, right) = (found.trim(), right.trim());
    found == right || matches!((Number::read(found), Number::read(right)), (Some(a), Some(b)) if a.equals(&b))
}

/// Whole numbers are kept exactly.
enum Number {
    Whole(i128),
    Real(f64),
}

impl Number {
    fn read(text: &str) -> Option<Self> {
        let digits = without_thousands(text)?;
        if let Ok(whole) = digits.parse() {
            return Some(Self::Whole(whole));
        }
        // `inf` and `nan` are words.
        let numeric = digits.bytes().all(|b| b.is_ascii_digit() || b"+-.eE".contains(&b));
        digits.parse().ok().filter(|x: &f64| numeric && x.is_finite()).map(Self::Real)
    }

    fn equals(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Whole(a), Self::Whole(b)) => a == b,
            _ => self.real() == other.real(),
        }
    }

    fn real(&self) -> f64 {
        match self {
            Self::Whole(whole) => *whole as f64,
            Self::Real(real) => *real,
        }
    }
}

/// `text` without commas, if those stand where they divide thousands.
fn without_thousands(text: &str) -> Option<String> {
    if text.contains(',') {
        let whole = text.trim_start_matches(['-', '+']).split('.').next()?;
        let mut groups = whole.split(',');
        let first = groups.next()?;
        if !(1..=3).contains(&first.len())
            || groups.any(|group| group.len() != 3)
            || text.matches(',').count() != whole.matches(',').count()
        {
            return None;
        }
    }
    Some(text.replace(',', ""))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usual(text: &str) -> Option<String> {
        AnswerRule::new(None).unwrap().find(text)
    }

    #[test]
    fn the_usual_rule() {
        for (text, found) in [
            ("16 * 28 = 448\nAnswer: 89", Some("89")),
            ("Answer: 1\nno\nanswer:  red apple \nso 7", Some("red apple")),
            ("The Answer: 5 of 6\r\n", Some("5 of 6")),
            ("Answer:\n 12", Some("12")),
            ("about 3 or 1,234.50 in all.", Some("1,234.50")),
            ("12,34", Some("34")),
            ("it is -7.", Some("-7")),
            ("9-7", Some("7")),
            ("nothing", None),
            ("", None),
        ] {
            assert_eq!(usual(text).as_deref(), found, "{text:?}");
        }
    }

    #[test]
    fn the_last_match_of_a_pattern() {
        let rule = AnswerRule::new(Some(r"Answer: (\d+)\s*$")).unwrap();
        assert_eq!(rule.find("Answer: 1\nAnswer: 23\n").as_deref(), Some("23"));
        assert_eq!(rule.find("Answer: 23 pears"), None);
        let rule = AnswerRule::new(Some(r"(?:is|was) \s*(\w*)")).unwrap();
        assert_eq!(rule.find("it was 1 and is 2").as_deref(), Some("2"));
    }

    #[test]
    fn patterns_that_cannot_be_used() {
        let error = |pattern| AnswerRule::new(Some(pattern)).unwrap_err();
        assert_eq!(error("a("), "\"a(\" is not a regular expression: unclosed group");
        assert!(error("Answer: \\d+").contains("has 0 groups; it needs one"));
        assert!(error("(a)(b)").contains("has 2 groups"));
    }

    #[test]
    fn right_and_wrong() {
        for (found, right) in [
            ("89", "89"),
            (" 89\n", "89"),
            ("1,234", "1234"),
            ("1,234,567.50", "1234567.5"),
            ("89.0", "89"),
            ("-3", "-3.00"),
            ("+3", "3"),
            ("0.50", ".5"),
            ("1e3", "1000"),
            ("red", "red"),
        ] {
            assert!(is_right(found, right) && is_right(right, found), "{found} {right}");
        }
        for (found, right) in [
            ("89", "98"),
            ("12,34", "1234"),
            ("1,2345", "12345"),
            ("1.234,567", "1.234567"),
            ("Red", "red"),
            ("nan", "NaN"),
            ("inf", "Infinity"),
            ("", "0"),
            // Beyond the precision of a float.
            ("9007199254740993", "9007199254740992"),
        ] {
            assert!(!is_right(found, right) && !is_right(right, found), "{found} {right}");
        }
    }
}
