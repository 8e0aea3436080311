//! Files with the results.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde_json::{Value, json};

use super::super::output::Failure;
use super::args::Eval;
use super::store::partial;
use crate::config::Config;
use crate::eval::bisect::Next;
use crate::eval::summary::{Row, Summary};
use crate::eval::{plot, report};
use crate::text::strftime;

fn places(arguments: &Eval) -> [(&'static str, Option<&Path>); 4] {
    [
        ("--output", arguments.output.as_deref()),
        ("--csv", arguments.csv.as_deref()),
        ("--plot", arguments.plot.as_deref()),
        ("--details", arguments.details.as_deref()),
    ]
}

/// The file that `path` stands for, whatever links lead there; it need not exist.
fn real(path: &Path) -> PathBuf {
    let parent = path.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."));
    let whole = path.canonicalize().ok();
    let by_parent = || Some(parent.canonicalize().ok()?.join(path.file_name()?));
    whole.or_else(by_parent).unwrap_or_else(|| path.into())
}

/// What cannot be written, or would overwrite what is read, shows before hours of work, as far as it can.
pub fn check_places(arguments: &Eval, config: &Config) -> Result<(), Failure> {
    let mut taken = vec![
        ("the configuration".to_owned(), real(&arguments.config)),
        ("the dataset".to_owned(), real(&arguments.dataset)),
    ];
    if let Some(output) = &arguments.output {
        taken.push(("what --output keeps until it is complete".into(), real(&partial(output))));
    }
    let models: Vec<(&str, PathBuf)> =
        config.models.iter().map(|m| (m.name.as_str(), real(&config.directory().join(&m.path)))).collect();
    let given: Vec<(&str, &Path)> =
        places(arguments).into_iter().filter_map(|(flag, file)| Some((flag, file?))).collect();
    for (flag, file) in &given {
        let fault = |message: &str| Err(Failure::input(format!("{flag}: {} {message}", file.display())));
        let parent = file.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."));
        if file.is_dir() {
            return fault("is a directory; give a file");
        }
        if !parent.is_dir() {
            return fault("cannot be written: its directory does not exist");
        }
        let place = real(file);
        if let Some((what, _)) = taken.iter().find(|(_, taken)| *taken == place) {
            return fault(&format!("is {what}; give another file"));
        }
        if let Some((model, _)) = models.iter().find(|(_, directory)| place.starts_with(directory)) {
            return fault(&format!("is in the directory of model `{model}`; give another place"));
        }
        if *flag == "--plot" && !file.extension().is_some_and(|e| e.eq_ignore_ascii_case("svg")) {
            return fault("must end in .svg: plots are SVG");
        }
        taken.push((format!("the file of {flag} already"), place));
    }
    Ok(())
}

/// What was evaluated, for the JSON file.
pub fn meta(arguments: &Eval, questions: usize, search: Option<&Next>) -> Value {
    let sampling = &arguments.sampling;
    let mut meta = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "date": date(),
        "config": arguments.config.display().to_string(),
        "dataset": arguments.dataset.display().to_string(),
        "questions": questions,
        "sampling": {
            "temperature": as_written(sampling.temperature),
            "top_p": as_written(sampling.top_p),
            "top_k": sampling.top_k,
            "max_tokens": arguments.max_tokens,
            "seed": sampling.seed,
        },
        "system": arguments.system,
        "answer_pattern": arguments.answer_pattern,
        "concurrency": arguments.concurrency,
    });
    if let (Some(wanted), Some(Next::Found { value, share } | Next::NotFound { value, share, .. })) =
        (arguments.target_share, search)
    {
        meta["target"] = json!({
            "setting": arguments.setting,
            "wanted_share": wanted,
            "tolerance": arguments.tolerance,
            "value": value,
            "share": share,
            "found": matches!(search, Some(Next::Found { .. })),
        });
    }
    meta
}

/// 0.7, not the double-precision number that is closest to its single-precision form.
fn as_written(number: f32) -> Option<f64> {
    number.to_string().parse().ok()
}

fn date() -> Option<String> {
    strftime(SystemTime::now(), "%FT%TZ").ok()
}

/// Write the files that were asked for.
pub fn write(arguments: &Eval, meta: Value, summaries: &[Summary], rows: &[Row]) -> Result<(), Failure> {
    let title = arguments.dataset.file_name().unwrap_or_default().to_string_lossy().into_owned();
    for (flag, file) in places(arguments) {
        let Some(file) = file else { continue };
        let bytes = match flag {
            "--output" => format!("{:#}\n", report::json(meta.clone(), summaries)).into_bytes(),
            "--csv" => report::csv(summaries).map_err(Failure::work)?,
            "--plot" => plot::svg(&title, summaries).map_err(Failure::work)?.into_bytes(),
            _ => report::details(rows).map_err(Failure::work)?.into_bytes(),
        };
        std::fs::write(file, bytes).map_err(|e| Failure::work(format!("{flag}: {}: {e}", file.display())))?;
    }
    Ok(())
}
