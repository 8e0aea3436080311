//! What can be written after `tokenrouter simulate`.

use std::path::PathBuf;

use clap::Args;

use crate::subserver::gate::Schedule;

/// Simulate a load on models of given speed: the server's own schedulers in virtual time
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub struct Simulate {
    /// The plan (TOML): models with their step times, how requests move between them, and the load
    pub plan: PathBuf,
    /// In place of batching.schedule; several are simulated one after the other
    #[arg(long = "schedule", value_name = "NAME,…", value_delimiter = ',', value_parser = Schedule::parse)]
    pub schedules: Vec<Schedule>,
    /// In place of simulation.arrivals: a closed loop with N requests under way; several numbers are
    /// simulated one after the other
    #[arg(long, value_name = "N,…", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub concurrency: Vec<u32>,
    /// In place of simulation.requests
    #[arg(long, value_name = "R", value_parser = clap::value_parser!(u32).range(1..=1 << 26))]
    pub requests: Option<u32>,
    /// In place of simulation.seed
    #[arg(long, value_name = "S")]
    pub seed: Option<u64>,
    /// Write the results as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write a line for each request as CSV
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,
}

const AFTER_HELP: &str = "\
Examples:
  tokenrouter simulate config/plans/r2r.toml
  tokenrouter simulate config/plans/r2r.toml --schedule delayed,eager,model-sync,step-sync \\
      --concurrency 4,8,16
  tokenrouter simulate plan.toml --json out.json --csv requests.csv

A plan:
  [batching]
  schedule = \"delayed\"              # or eager, model-sync, step-sync
  [simulation]
  arrivals = { closed = 8 }         # or { poisson = 12.5 } a second, { bursts = 16, every_ms = 500 },
                                    # { trace = \"trace.csv\" } (arrival_ms, prompt_tokens, output_tokens)
  requests = 64                     # in all
  prompt = 128                      # tokens; [64, 256] draws each length with the same probability
  output = [100, 900]
  entry = \"small\"                   # the first model without it
  network_ms = 0.1                  # of a message between two hosts
  seed = 0
  [models.small]
  step_ms = { 1 = 5.6, 16 = 6.4 }   # by batch size, straight lines between; or one number
  row_ms = 0.01                     # more for each row beyond one a request: prompts, catching up
  stretch = 1.3                     # while another model of its host runs; [1.3, 1.5] with one, two
  host = \"a\"                        # or hosts = [\"a\", \"b\"], an instance on each
  min_batch = 1                     # as in a configuration; so are max_wait_ms and hold_ms
  routing = { small = 0.65, large = 0.35 }
  commit = { large = 0 }            # whether the candidate stands; 1 without it

Request r is served by instance r mod n of a model with n. Instances that share no request, directly
or not, are servers of their own, with turns and live requests of their own.

What is shown:
  tokens/s  all tokens, by the time from the first submission to the last token
  steady    tokens/s between the first tenth of all tokens and the last
  TTFT      from the submission to the first token; TPOT from there to the last token, by the tokens
            after the first; E2E from the submission to the last token: percentiles of the requests
  batch     requests of a step on average; busy: share of the time with a step under way";

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Wrapper {
        #[command(flatten)]
        simulate: Simulate,
    }

    #[test]
    fn lists_and_refusals() {
        let parse = |more: &str| {
            let all = format!("simulate p.toml {more}");
            Wrapper::try_parse_from(all.split_whitespace()).map(|w| w.simulate).map_err(|e| e.to_string())
        };
        let simulate = parse("--schedule eager,step-sync --concurrency 1,4").unwrap();
        assert_eq!(simulate.schedules, [Schedule::Eager, Schedule::StepSync]);
        assert_eq!(simulate.concurrency, [1, 4]);
        for (more, message) in [
            ("--schedule lazy", "must be \"delayed\", \"eager\", \"model-sync\" or \"step-sync\""),
            ("--concurrency 0", "0 is not in 1..="),
        ] {
            let error = parse(more).unwrap_err();
            assert!(error.contains(message), "{error}");
        }
    }
}
