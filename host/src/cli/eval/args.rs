//! What can be written after `tokenrouter eval`.

use std::path::PathBuf;

use clap::Args;

use super::super::args::Sampling;

/// Measure how many questions routes answer correctly, and who writes the tokens
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tokenrouter eval config/demo.toml --route rstitch --dataset models/demo/eval.jsonl
  tokenrouter eval config/demo.toml --route rstitch --route small --route large \\
      --dataset models/demo/eval.jsonl --sweep threshold=0.01,0.03,0.1 \\
      --output out.json --plot out.svg
  tokenrouter eval config/demo.toml --route me --dataset models/demo/eval.jsonl \\
      --sweep 'weights=[{small=0.8, medium=0.1, large=0.1}, {small=0.5, medium=0.3, large=0.2}]'
  tokenrouter eval config/demo.toml --route rstitch --dataset models/demo/eval.jsonl \\
      --target-share 0.1 --limit 200

The dataset has one object {\"question\": …, \"answer\": …} a line. With --output an evaluation that is
broken off goes on where it was when the same command is given again.")]
pub struct Eval {
    /// Configuration file (TOML)
    pub config: PathBuf,
    /// Route or model that answers; may be given several times
    #[arg(long = "route", value_name = "NAME", required_unless_present = "all")]
    pub routes: Vec<String>,
    /// Every route and every model of the configuration
    #[arg(long, conflicts_with = "routes")]
    pub all: bool,
    /// Questions with their answers (JSON lines)
    #[arg(long, value_name = "FILE")]
    pub dataset: PathBuf,
    /// Only the first N questions
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub limit: Option<u32>,
    /// System message before each question
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Regular expression whose one group is the answer, in its last match [default: what follows the
    /// last `Answer:` on its line, or else the last number]
    #[arg(long, value_name = "REGEX", allow_hyphen_values = true)]
    pub answer_pattern: Option<String>,
    /// Questions under way at once
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub concurrency: u32,
    /// Most tokens of an answer, over all models together; less where the context ends before
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_tokens: u32,
    #[command(flatten)]
    pub sampling: Sampling,
    /// Evaluate each value of a setting: NAME=V1,V2 or NAME=[V1, V2]; dots lead into tables. Given several
    /// times, every combination
    #[arg(long = "sweep", value_name = "NAME=VALUES")]
    pub sweeps: Vec<String>,
    /// Find the value of --setting with which the last model of the route writes this share of the tokens
    #[arg(long, value_name = "SHARE", value_parser = share, conflicts_with_all = ["sweeps", "all"])]
    pub target_share: Option<f64>,
    /// The setting to be found
    #[arg(long, value_name = "NAME", default_value = "threshold", requires = "target_share")]
    pub setting: String,
    /// Where to look for it [default: the minimum and maximum in the plugin's schema]
    #[arg(long, value_name = "LOW,HIGH", value_parser = range, requires = "target_share", allow_hyphen_values = true)]
    pub range: Option<(f64, f64)>,
    /// How far the share may be from --target-share
    #[arg(long, value_name = "SHARE", default_value_t = 0.005, value_parser = share, requires = "target_share")]
    pub tolerance: f64,
    /// Write the results as JSON; makes the evaluation resumable
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Write the results as CSV
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,
    /// Draw accuracy against the share of the large model (SVG)
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
    /// Write every answer (JSON lines)
    #[arg(long, value_name = "FILE")]
    pub details: Option<PathBuf>,
    /// Record the evaluation as the [record] table of the configuration says
    #[arg(long, conflicts_with = "target_share")]
    pub record: bool,
    /// Forget what an evaluation that was broken off has left at --output
    #[arg(long, requires = "output")]
    pub restart: bool,
}

fn share(text: &str) -> Result<f64, String> {
    let share = text.parse().ok().filter(|share: &f64| *share > 0.0 && *share < 1.0);
    share.ok_or_else(|| "must be above 0 and below 1".into())
}

fn range(text: &str) -> Result<(f64, f64), String> {
    let rule = || "must be two numbers LOW,HIGH with LOW below HIGH".to_string();
    let (low, high) = text.split_once(',').ok_or_else(rule)?;
    match (low.trim().parse::<f64>(), high.trim().parse::<f64>()) {
        (Ok(low), Ok(high)) if low < high && low.is_finite() && high.is_finite() => Ok((low, high)),
        _ => Err(rule()),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::super::super::args::{Arguments, Command};
    use super::*;

    fn parse(more: &[&str]) -> Result<Eval, String> {
        let all = ["tokenrouter", "eval", "c.toml", "--dataset", "d.jsonl"].iter().chain(more);
        match Arguments::try_parse_from(all).map_err(|e| e.to_string())?.command {
            Command::Eval(eval) => Ok(*eval),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn defaults() {
        let eval = parse(&["--route", "r", "--route", "small"]).unwrap();
        assert_eq!((eval.routes.len(), eval.concurrency, eval.max_tokens), (2, 16, 512));
        assert_eq!((eval.sampling.temperature, eval.sampling.seed, eval.tolerance), (0.0, 0, 0.005));
        let eval = parse(&["--route", "r", "--target-share", "0.1", "--range", "-1,1e1"]).unwrap();
        assert_eq!((eval.setting.as_str(), eval.range), ("threshold", Some((-1.0, 10.0))));
    }

    #[test]
    fn refusals() {
        for (more, message) in [
            (&[][..], "--route"),
            (&["--all", "--route", "r"], "cannot be used with"),
            (&["--all", "--target-share", "0.1"], "cannot be used with"),
            (&["--route", "r", "--sweep", "a=1", "--target-share", "0.1"], "cannot be used with"),
            (&["--route", "r", "--target-share", "1"], "must be above 0 and below 1"),
            (&["--route", "r", "--range", "0,1"], "--target-share"),
            (&["--route", "r", "--target-share", "0.1", "--range", "1,0"], "must be two numbers LOW,HIGH"),
            (&["--route", "r", "--limit", "0"], "0 is not in 1.."),
            (&["--route", "r", "--concurrency", "0"], "0 is not in 1.."),
            (&["--route", "r", "--restart"], "--output"),
        ] {
            let error = parse(more).unwrap_err();
            assert!(error.contains(message), "{more:?}: {error}");
        }
    }
}
