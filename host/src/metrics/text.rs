//! The text format of Prometheus, version 0.0.4.

use std::borrow::Cow;
use std::fmt::{Display, Write};

use super::Distribution;

pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Names and values of labels, in order.
pub type Labels<'a> = [(&'a str, &'a str)];

/// In what a histogram counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    One,
    /// Nanoseconds, written in seconds.
    Time,
}

impl Unit {
    fn of(self, value: u64) -> f64 {
        match self {
            Self::One => value as f64,
            Self::Time => value as f64 / 1e9,
        }
    }
}

/// Families of samples one after the other. All samples of a family follow its head.
#[derive(Debug, Default)]
pub struct Exposition {
    text: String,
    name: &'static str,
}

impl Exposition {
    pub fn counter(&mut self, name: &'static str, help: &str) -> &mut Self {
        self.head(name, "counter", help)
    }

    pub fn gauge(&mut self, name: &'static str, help: &str) -> &mut Self {
        self.head(name, "gauge", help)
    }

    pub fn histogram(&mut self, name: &'static str, help: &str) -> &mut Self {
        self.head(name, "histogram", help)
    }

    fn head(&mut self, name: &'static str, kind: &str, help: &str) -> &mut Self {
        self.name = name;
        self.line(format_args!("# HELP {name} {}\n# TYPE {name} {kind}", escaped(help, false)))
    }

    fn line(&mut self, line: std::fmt::Arguments<'_>) -> &mut Self {
        // Writing to a string cannot fail.
        let _ = writeln!(self.text, "{line}");
        self
    }

    /// A sample of the present family.
    pub fn sample(&mut self, labels: &Labels<'_>, value: impl Display) -> &mut Self {
        let (name, labels) = (self.name, written(labels, None));
        self.line(format_args!("{name}{labels} {value}"))
    }

    /// A histogram of the present family.
    pub fn distribution(&mut self, labels: &Labels<'_>, seen: &Distribution, unit: Unit) -> &mut Self {
        let name = self.name;
        let mut below = 0;
        for (bound, count) in seen.bounds.iter().zip(&seen.classes) {
            below += count;
            let labels = written(labels, Some(&unit.of(*bound).to_string()));
            self.line(format_args!("{name}_bucket{labels} {below}"));
        }
        let (all, plain) = (written(labels, Some("+Inf")), written(labels, None));
        let (count, sum) = (seen.count(), unit.of(seen.sum));
        self.line(format_args!("{name}_bucket{all} {count}\n{name}_sum{plain} {sum}\n{name}_count{plain} {count}"))
    }

    pub fn into_text(self) -> String {
        self.text
    }
}

fn written(labels: &Labels<'_>, bound: Option<&str>) -> String {
    let all = labels.iter().copied().chain(bound.map(|bound| ("le", bound)));
    let all: Vec<String> = all.map(|(name, value)| format!("{name}=\"{}\"", escaped(value, true))).collect();
    if all.is_empty() { String::new() } else { format!("{{{}}}", all.join(",")) }
}

fn escaped(text: &str, quoted: bool) -> Cow<'_, str> {
    if !text.contains(['\\', '\n', '"']) {
        return text.into();
    }
    let text = text.replace('\\', "\\\\").replace('\n', "\\n");
    if quoted { text.replace('"', "\\\"") } else { text }.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_format() {
        let mut out = Exposition::default();
        out.counter("a_total", "What\nit \"is\".").sample(&[("x", "a\"b\\c\nd"), ("y", "é")], 4).sample(&[], 0.5);
        let seen = Distribution { bounds: &[500_000, 2_000_000_000], classes: vec![1, 0, 2], sum: 1_500_000 };
        out.histogram("h_seconds", "Times.").distribution(&[("m", "s")], &seen, Unit::Time);
        out.histogram("n", "Numbers.").distribution(&[], &Distribution { bounds: &[3], ..seen }, Unit::One);
        let expected = r#"# HELP a_total What\nit "is".
# TYPE a_total counter
a_total{x="a\"b\\c\nd",y="é"} 4
a_total 0.5
# HELP h_seconds Times.
# TYPE h_seconds histogram
h_seconds_bucket{m="s",le="0.0005"} 1
h_seconds_bucket{m="s",le="2"} 1
h_seconds_bucket{m="s",le="+Inf"} 3
h_seconds_sum{m="s"} 0.0015
h_seconds_count{m="s"} 3
# HELP n Numbers.
# TYPE n histogram
n_bucket{le="3"} 1
n_bucket{le="+Inf"} 3
n_sum 1500000
n_count 3
"#;
        assert_eq!(out.into_text(), expected);
    }
}
