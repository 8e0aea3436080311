//! What can be written after `tokenrouter tune`.

use std::path::PathBuf;

use clap::{ArgGroup, Args};

use super::input::{Concurrency, Hold, Route, Times};

/// Find how many requests each model should wait for: the thresholds with the highest throughput
#[derive(Debug, Args)]
#[command(
    group = ArgGroup::new("what").args(["system", "times", "from", "case"]).required(true),
    after_help = AFTER_HELP,
)]
pub struct Tune {
    /// Description of the models (TOML), for more than the options say; see below
    pub system: Option<PathBuf>,
    /// Milliseconds of a step of each model, alone; slashes between those of batches of 1, 2, …
    #[arg(long, value_name = "MS,…", value_delimiter = ',', allow_hyphen_values = true)]
    pub times: Vec<Times>,
    /// Take step times (means) and routes from the JSON of `tokenrouter bench`, or of a server that runs
    #[arg(long, value_name = "FILE|http://HOST:PORT")]
    pub from: Option<PathBuf>,
    /// With --json: answer one conformance case (JSON); `-` reads it from standard input
    #[arg(long, value_name = "FILE", conflicts_with_all = OPTIONS)]
    pub case: Option<PathBuf>,
    /// Names of the models [default: small,large for two, else m0,m1,…]
    #[arg(long, value_name = "NAME,…", value_delimiter = ',', requires = "times")]
    pub names: Vec<String>,
    /// Two models: share of the steps of the first whose token the second one writes in its place, as R2R and
    /// Co-LLM do
    #[arg(long, value_name = "P", conflicts_with_all = ["system", "routes"], allow_hyphen_values = true)]
    pub handoff: Option<f64>,
    /// Where a step of FROM leads, with what probability, and how many tokens it writes then (1 if not
    /// said); once for each model
    #[arg(long = "route", value_name = "FROM:TO=P[*TOKENS],…", conflicts_with = "system")]
    pub routes: Vec<Route>,
    /// Requests under way: a number, a range or both in a list
    #[arg(long, value_name = "N", default_value = "1..16", conflicts_with = "case")]
    pub concurrency: Concurrency,
    /// How many times longer a step of each model takes while others run
    #[arg(long, value_name = "X,…", value_delimiter = ',', conflicts_with = "system", allow_hyphen_values = true)]
    pub stretch: Vec<f64>,
    /// Milliseconds that each model waits for a running one to end, `auto` to choose them too
    #[arg(long, value_name = "MS,…", value_delimiter = ',', allow_hyphen_values = true)]
    pub hold: Vec<Hold>,
    /// Most requests of a batch of each model, 0 = all that wait
    #[arg(long, value_name = "B,…", value_delimiter = ',', conflicts_with = "system")]
    pub max_batch: Vec<usize>,
    /// Thresholds that are given, `auto` for those to choose
    #[arg(long, value_name = "B,…", value_delimiter = ',')]
    pub min_batch: Vec<Fixed>,
    /// Write the answer as JSON
    #[arg(long)]
    pub json: bool,
    /// Draw predicted throughput over the threshold of one model, a line for each N (SVG)
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
}

/// Options that describe what a case describes itself.
const OPTIONS: [&str; 8] = ["names", "handoff", "routes", "stretch", "hold", "max_batch", "min_batch", "plot"];

/// A threshold, or `auto`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fixed(pub Option<u32>);

impl std::str::FromStr for Fixed {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self(None)),
            text => text.parse().map(|b| Self(Some(b))).map_err(|_| "must be a whole number from 1, or auto".into()),
        }
    }
}

const AFTER_HELP: &str = "\
Examples:
  tokenrouter tune --times 6.0,27.9 --handoff 0.35 --concurrency 1..16
  tokenrouter tune --times 6.0,27.9 --handoff 0.35 --concurrency 8 --stretch 3.4,1.09 --hold auto,0
  tokenrouter tune --times 6.0,12.0,27.9/28.4/28.9 --names small,medium,large \\
      --route small:small=0.5,medium=0.3,large=0.2 --route medium:small=1 --route large:small=1
  tokenrouter bench CONFIG --route R --requests 1,4,16 --output-len 512 --json bench.json
  tokenrouter tune --from bench.json --concurrency 1..16 --plot throughput.svg
  tokenrouter tune --from http://127.0.0.1:30000 --concurrency 1..32
  tokenrouter tune models.toml --concurrency 4,8,16 --json
  tokenrouter tune --case case.json --json

A model starts a step when at least its threshold of requests wait for it. Throughput under given
thresholds is that of an exact Markov chain; where the chain would be too large it is simulated,
and the answer says so. Thresholds that could lock up, sum(B - 1) >= N, are never chosen. The
answer is a table and the lines for the configuration. `vs eager` compares with thresholds of 1.
A hold counts up to max_wait_ms, so that one beyond the default of 50 comes with a line for it.

A description has a table for each model, the one that gets new requests first:
  [[models]]
  name = \"small\"
  step_ms = 6.0                # or a list: batches of 1, 2, …
  routes = { small = 0.65, large = 0.35 }
  tokens = { large = 0 }       # tokens of a step by where it leads; 1 where not given
  stretch = 3.4                # default 1
  max_batch = 8                # default: all that wait
  [[models]]
  name = \"large\"
  step_ms = [27.9, 28.4]
  routes = { small = 1 }
A last key, sigma = [1, 1, 1.3], may stretch all steps while 0, 1, 2… models run.
docs/batching.md explains the model and its limits.";

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::super::super::args::{Arguments, Command};
    use super::*;

    fn parse(more: &[&str]) -> Result<Tune, String> {
        let all = ["tokenrouter", "tune"].iter().chain(more);
        match Arguments::try_parse_from(all).map_err(|e| e.to_string())?.command {
            Command::Tune(tune) => Ok(*tune),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn two_models() {
        let tune = parse(&["--times", "6.0,27.9/28.4", "--handoff", "0.35", "--min-batch", "1,auto"]).unwrap();
        assert_eq!(tune.times, [Times(vec![6.0]), Times(vec![27.9, 28.4])]);
        assert_eq!((tune.handoff, tune.min_batch), (Some(0.35), vec![Fixed(Some(1)), Fixed(None)]));
        assert_eq!(tune.concurrency.0, (1..=16).collect::<Vec<_>>());
    }

    #[test]
    fn refusals() {
        for (more, message) in [
            (&[][..], "<SYSTEM|--times <MS,…>|--from <FILE|http://HOST:PORT>|--case <FILE>>"),
            (&["--times", "6,x"], "must be milliseconds"),
            (&["--times", "6", "--concurrency", "0"], "must be from 1 to 4096"),
            (&["--times", "6", "--concurrency", "8..4"], "is empty"),
            (&["--times", "6", "--route", "small"], "must be FROM:TO=P"),
            (&["--times", "6", "--hold", "soon"], "must be milliseconds, or auto"),
            (&["--times", "6", "--min-batch", "x"], "must be a whole number from 1, or auto"),
            (&["--case", "x", "--json", "--handoff", "0.3"], "cannot be used with"),
            (&["--times", "6", "--from", "x"], "cannot be used with"),
        ] {
            let error = parse(more).unwrap_err();
            assert!(error.contains(message), "{more:?}: {error}");
        }
    }
}
