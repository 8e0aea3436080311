//! `tokenrouter plugin check`: the process that waits for the one in which the plugin runs.

use std::io::{Read, Seek};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;
use tempfile::NamedTempFile;

use super::args::Check;
use super::child::{Line, name, needed};
use super::{group, report};
use crate::cli::output::{Failure, write_stdout};
use crate::policy::check::{CHECKS, Finding, Status};

/// How often the other process is looked at.
const LOOK: Duration = Duration::from_millis(10);

pub fn run(arguments: &Check) -> Result<(), Failure> {
    let mut findings: Vec<Finding> = Vec::new();
    // Load comes before the checks. A check that ends its process is over; the next begin in a new one.
    while findings.len() <= CHECKS.len() {
        let ended = child(arguments, findings.len()).map_err(Failure::work)?;
        let lines = ended.lines;
        let under_way = lines.iter().rev().find_map(|line| match line {
            Line::Begins(number) => Some(*number),
            _ => None,
        });
        let done = lines.contains(&Line::Done);
        findings.extend(lines.into_iter().filter_map(|line| match line {
            Line::Found(finding) => Some(finding),
            _ => None,
        }));
        if done {
            break;
        }
        let number = findings.len();
        if under_way != Some(number) {
            return Err(Failure::work(format!("the process that runs the plugin {}", ended.how)));
        }
        findings.push(Finding::failed(format!("the plugin {}", ended.how), ended.remedy).of(name(number)));
        if needed(number) {
            break;
        }
    }
    let why = Finding { status: Status::NotRun, ..Finding::ok("needs a check that failed") };
    findings.extend((findings.len()..=CHECKS.len()).map(|number| why.clone().of(name(number))));
    tell(arguments, &findings)
}

fn tell(arguments: &Check, findings: &[Finding]) -> Result<(), Failure> {
    let failed = findings.iter().filter(|f| f.status == Status::Failed).count();
    let text = if arguments.json {
        let models: Vec<_> = arguments.roles.iter().map(|m| json!({ "name": m.name, "role": m.role })).collect();
        let settings = arguments.settings.clone().unwrap_or_else(|| json!({}));
        let (file, passed) = (&arguments.file, failed == 0);
        format!(
            "{:#}\n",
            json!({ "file": file, "models": models, "settings": settings, "passed": passed, "checks": findings })
        )
    } else {
        report::table(findings)
    };
    write_stdout(&text)?;
    match failed {
        0 => Ok(()),
        n => Err(Failure::work(format!(
            "plugin `{}`: {n} of {} checks failed",
            arguments.file.display(),
            findings.len()
        ))),
    }
}

/// What came of a process.
struct Ended {
    lines: Vec<Line>,
    /// How it ended, for a sentence about the plugin.
    how: String,
    remedy: &'static str,
}

/// Run the checks from number `from` on in a process of their own.
fn child(arguments: &Check, from: usize) -> std::io::Result<Ended> {
    let findings = NamedTempFile::new()?;
    let mut errors = tempfile::tempfile()?;
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["plugin", "check"]).arg(&arguments.file).arg("--findings").arg(findings.path());
    command.args(["--from", &from.to_string()]);
    let roles: Vec<_> = arguments.roles.iter().map(|m| format!("{}={}", m.name, m.role)).collect();
    command.args(["--roles", &roles.join(",")]);
    if let Some(settings) = &arguments.settings {
        command.args(["--settings", &settings.to_string()]);
    }
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors.try_clone()?);
    // Processes that the plugin starts belong to the group, too, and end with it.
    let mut process = command.process_group(0).spawn()?;
    let group = process.id();
    let limit = Duration::from_secs(arguments.timeout);
    let (mut since, mut written) = (Instant::now(), 0);
    let status = loop {
        if let Some(status) = process.try_wait()? {
            break Some(status);
        }
        let now_written = findings.as_file().metadata()?.len();
        if now_written != written {
            (since, written) = (Instant::now(), now_written);
        }
        if since.elapsed() > limit {
            break None;
        }
        std::thread::sleep(LOOK);
    };
    group::end(group)?;
    if status.is_none() {
        process.wait()?;
    }
    // What a plugin writes need not be text.
    let mut said = Vec::new();
    errors.rewind()?;
    errors.read_to_end(&mut said)?;
    let said = String::from_utf8_lossy(&said);
    let (how, remedy) = match status {
        Some(status) => (died(status, &said), "Mend what ends the process; nothing of a plugin may."),
        None => (
            format!("did not come back within {} s", arguments.timeout),
            "Mend the loop, or give a slow plugin more with --timeout.",
        ),
    };
    Ok(Ended { lines: read(findings.path())?, how, remedy })
}

/// A last line that was not finished is none.
fn read(path: &Path) -> std::io::Result<Vec<Line>> {
    let text = std::fs::read_to_string(path)?;
    Ok(text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect())
}

/// How a process ended, and the last line it said.
fn died(status: ExitStatus, said: &str) -> String {
    let how = match (status.signal(), status.code()) {
        (Some(signal), _) => format!("ended the process by signal {}", named(signal)),
        (None, code) => format!("ended the process with exit status {}", code.unwrap_or_default()),
    };
    match said.lines().map(str::trim).rfind(|line| !line.is_empty()) {
        Some(line) => format!("{how}: {}", line.chars().take(300).collect::<String>()),
        None => how,
    }
}

fn named(signal: i32) -> String {
    let name = match signal {
        libc::SIGABRT => "SIGABRT",
        libc::SIGBUS => "SIGBUS",
        libc::SIGFPE => "SIGFPE",
        libc::SIGILL => "SIGILL",
        libc::SIGKILL => "SIGKILL",
        libc::SIGSEGV => "SIGSEGV",
        _ => return signal.to_string(),
    };
    format!("{signal} ({name})")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_to_die() {
        let by = |raw| ExitStatus::from_raw(raw);
        assert_eq!(died(by(libc::SIGSEGV), ""), "ended the process by signal 11 (SIGSEGV)");
        assert_eq!(died(by(0), "one\n two \n\n"), "ended the process with exit status 0: two");
        assert_eq!(died(by(3 << 8), ""), "ended the process with exit status 3");
    }

    #[test]
    fn an_unfinished_line_is_none() {
        let mut file = NamedTempFile::new().unwrap();
        std::io::Write::write_all(&mut file, b"{\"begins\":3}\n\"done\"\n{\"fou").unwrap();
        assert_eq!(read(file.path()).unwrap(), [Line::Begins(3), Line::Done]);
    }
}
