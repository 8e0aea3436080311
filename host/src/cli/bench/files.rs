//! The files that a command writes.

use std::path::Path;

use super::args::Bench;
use crate::cli::output::Failure;

/// A file that cannot be written shows before minutes of work, as far as it can.
pub fn check_places(arguments: &Bench) -> Result<(), Failure> {
    let load = &arguments.load;
    let given = [
        ("--json", &arguments.json),
        ("--csv", &load.csv),
        ("--plot", &load.plot),
        ("--timeline", &load.timeline),
        ("--timeline-svg", &load.timeline_svg),
    ];
    let mut taken: Vec<&Path> = load.config.iter().chain(&load.dataset).map(|file| file.as_path()).collect();
    for (flag, file) in given.into_iter().filter_map(|(flag, file)| Some((flag, file.as_deref()?))) {
        let fault = |message: &str| Err(Failure::input(format!("{flag}: {} {message}", file.display())));
        let parent = file.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."));
        if file.is_dir() {
            return fault("is a directory; give a file");
        }
        if !parent.is_dir() {
            return fault("cannot be written: its directory does not exist");
        }
        if taken.contains(&file) {
            return fault("is given twice; give another file");
        }
        let svg = file.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("svg"));
        if matches!(flag, "--timeline-svg" | "--plot") && !svg {
            return fault("must end in .svg");
        }
        taken.push(file);
    }
    Ok(())
}

pub fn write_json(flag: &str, file: &Path, value: &serde_json::Value) -> Result<(), Failure> {
    write(flag, file, format!("{value}\n"))
}

pub fn write(flag: &str, file: &Path, text: impl AsRef<[u8]>) -> Result<(), Failure> {
    std::fs::write(file, text).map_err(|e| Failure::work(format!("{flag}: {} cannot be written: {e}", file.display())))
}
