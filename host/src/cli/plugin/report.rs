//! Findings as a table. Pure.

use crate::policy::check::{Finding, Status};

const WIDTH: usize = 100;
/// Where the last column begins.
const TEXT: usize = 28;

pub fn table(findings: &[Finding]) -> String {
    let mut out = line("check", "result", "what was seen");
    for finding in findings {
        let mut lines = wrapped(&finding.what);
        let remedy = if finding.remedy.is_empty() { Vec::new() } else { wrapped(&format!("-> {}", finding.remedy)) };
        lines.extend(remedy);
        let mut lines = lines.iter();
        let first = lines.next().map_or("", String::as_str);
        out += &line(&finding.check, word(finding.status), first);
        lines.for_each(|text| out += &line("", "", text));
    }
    let count = |status| findings.iter().filter(|f| f.status == status).count();
    let counts = [Status::Ok, Status::Warning, Status::Failed, Status::NotRun].map(|s| (count(s), word(s)));
    let counts: Vec<_> = counts.iter().filter(|(n, _)| *n > 0).map(|(n, word)| format!("{n} {word}")).collect();
    format!("{out}\n{}\n", counts.join(", "))
}

fn word(status: Status) -> &'static str {
    match status {
        Status::Ok => "ok",
        Status::Warning => "warning",
        Status::Failed => "failed",
        Status::NotRun => "not run",
    }
}

fn line(check: &str, result: &str, text: &str) -> String {
    format!("{}\n", format!("{check:<19}{result:<9}{text}").trim_end())
}

/// Lines of at most the last column's width; a word that is longer is cut into pieces.
fn wrapped(text: &str) -> Vec<String> {
    let width = WIDTH - TEXT;
    let mut lines = vec![String::new()];
    let mut used = 0;
    for word in text.split_whitespace() {
        let letters: Vec<char> = word.chars().collect();
        for (at, piece) in letters.chunks(width).enumerate() {
            let gap = usize::from(at == 0 && used > 0);
            if used + gap + piece.len() > width {
                lines.push(String::new());
                used = 0;
            }
            if let Some(line) = lines.last_mut() {
                if gap == 1 && used > 0 {
                    line.push(' ');
                    used += 1;
                }
                line.extend(piece);
                used += piece.len();
            }
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fits_the_terminal() {
        let long = format!("{} {}", "word ".repeat(40), "x".repeat(150));
        let findings = [
            Finding::ok("fine").of("load"),
            Finding::failed(long, "Mend it.").of("alone or together"),
            Finding { status: Status::NotRun, ..Finding::ok("needs another") }.of("cost"),
        ];
        let table = table(&findings);
        let lines: Vec<_> = table.lines().collect();
        assert!(lines.iter().all(|line| line.chars().count() <= WIDTH), "{table}");
        assert_eq!(lines[1], "load               ok       fine");
        assert!(lines[2].starts_with("alone or together  failed   word word"), "{table}");
        assert!(lines.contains(&"                            -> Mend it."), "{table}");
        assert_eq!(lines.last(), Some(&"1 ok, 1 failed, 1 not run"));
        assert_eq!(table.matches('x').count(), 150);
    }
}
