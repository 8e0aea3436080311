//! What can be written on the command line.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use super::bench::Bench;
use super::doctor::{Completions, Doctor};
use super::eval::Eval;
use super::plugin::Plugin;
use super::replay::Replay;
use super::simulate::Simulate;
use super::tune::Tune;

/// An LLM server that routes tokens, not requests, between models
#[derive(Debug, Parser)]
#[command(name = "tokenrouter", version, max_term_width = 100, disable_help_subcommand = true, after_help = AFTER_HELP)]
pub struct Arguments {
    /// What to log, for example `warn` or `info,tokenrouter::subserver=debug` [default: info for
    /// `serve`, warn for the others]
    #[arg(long, global = true, env = "RUST_LOG", value_name = "FILTER", hide_env_values = true)]
    pub log: Option<String>,
    #[command(subcommand)]
    pub command: Command,
}

const AFTER_HELP: &str = "\
Examples:
  tokenrouter check config/demo.toml
  tokenrouter generate config/demo.toml --route rstitch --prompt 'Compute 17 * 24.'
  tokenrouter serve config/demo.toml --port 8000
  tokenrouter eval config/demo.toml --route rstitch --dataset models/demo/eval.jsonl
  tokenrouter bench config/demo.toml --route rstitch --requests 1,4 --output-len 64
  tokenrouter simulate config/plans/r2r.toml --schedule delayed,eager
  tokenrouter tune --times 6.0,27.9 --handoff 0.35 --concurrency 1..16
  tokenrouter plugin new my-policy
  tokenrouter replay recordings/run-00000 --plugin my-policy.wat
  tokenrouter doctor config/demo.toml

Any key of the configuration can be set by the environment: TOKENROUTER__SERVER__PORT=8000";

#[derive(Debug, Subcommand)]
pub enum Command {
    Serve(Serve),
    Generate(Generate),
    Eval(Box<Eval>),
    Bench(Box<Bench>),
    Simulate(Simulate),
    Tune(Box<Tune>),
    Check(Check),
    Plugin(Plugin),
    Replay(Box<Replay>),
    Doctor(Doctor),
    Completions(Completions),
}

/// Serve the routes and models of a configuration over HTTP
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Examples:
  tokenrouter serve config/demo.toml
  tokenrouter serve config/demo.toml --host 0.0.0.0 --port 8000

The first SIGTERM or SIGINT lets running requests finish (server.drain_timeout), the second ends at once
with exit status 1.
SIGHUP reads the configuration anew: other routes are taken over while requests run.")]
pub struct Serve {
    /// Configuration file (TOML)
    pub config: PathBuf,
    /// Address to listen at, in place of server.host
    #[arg(long)]
    pub host: Option<IpAddr>,
    /// Port to listen at, in place of server.port; 0 lets the system choose
    #[arg(long)]
    pub port: Option<u16>,
}

/// Write one answer in the terminal, each token in the colour of the model that wrote it
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tokenrouter generate config/demo.toml --route rstitch --prompt 'Compute 17 * 24.'
  tokenrouter generate config/demo.toml --route large --prompt - --raw < prompt.txt
  tokenrouter generate config/demo.toml --route me --prompt-ids 1,2,3 --json | jq .tokens[].model")]
pub struct Generate {
    /// Configuration file (TOML)
    pub config: PathBuf,
    /// Route or model that answers
    #[arg(long, value_name = "NAME")]
    pub route: String,
    /// What to say; `-` reads it from standard input
    #[arg(long, value_name = "TEXT", required_unless_present = "prompt_ids", allow_hyphen_values = true)]
    pub prompt: Option<String>,
    /// The prompt as token ids, taken as they are
    #[arg(long, value_name = "IDS", value_delimiter = ',', conflicts_with_all = ["prompt", "raw", "system"])]
    pub prompt_ids: Option<Vec<u32>>,
    /// Continue the prompt as it is, without the model's chat template
    #[arg(long, conflicts_with = "system")]
    pub raw: bool,
    /// System message before the prompt
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Most tokens to write, over all models together
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_tokens: u32,
    #[command(flatten)]
    pub sampling: Sampling,
    /// Write JSON: the text, and each token with its model, logprob and signals
    #[arg(long)]
    pub json: bool,
}

/// How tokens are drawn
#[derive(Clone, Debug, Args)]
pub struct Sampling {
    /// 0 takes the most probable token each time
    #[arg(long, value_name = "T", default_value_t = 0.0, value_parser = temperature, allow_negative_numbers = true)]
    pub temperature: f32,
    /// Draw from the smallest set of tokens with this much probability
    #[arg(long, value_name = "P", default_value_t = 1.0, value_parser = top_p, allow_negative_numbers = true)]
    pub top_p: f32,
    /// Draw from this many tokens; 0 or -1 for all
    #[arg(long, value_name = "K", default_value_t = 0, value_parser = top_k, allow_negative_numbers = true)]
    pub top_k: u32,
    /// The same seed gives the same answer; `eval` draws question i, counted from 0, with seed + i
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = seed, allow_negative_numbers = true)]
    pub seed: u64,
}

/// Validate a configuration with its models, plugins and tokenizers, without serving
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tokenrouter check config/demo.toml

Exit status is 0 when everything would start, 2 when something is wrong.")]
pub struct Check {
    /// Configuration file (TOML)
    pub config: PathBuf,
}

fn temperature(text: &str) -> Result<f32, String> {
    in_range(text, |t| (0.0..=2.0).contains(&t), "must be from 0 to 2")
}

fn top_p(text: &str) -> Result<f32, String> {
    in_range(text, |p| p > 0.0 && p <= 1.0, "must be above 0 and at most 1")
}

/// As over HTTP, -1 is another way to say all.
fn top_k(text: &str) -> Result<u32, String> {
    match text {
        "-1" => Ok(0),
        text => text.parse().map_err(|_| format!("must be from -1 to {}", u32::MAX)),
    }
}

/// As over HTTP, a negative seed stands for the 64 bits it is stored in.
fn seed(text: &str) -> Result<u64, String> {
    let signed = |_| text.parse::<i64>().map(|seed| seed as u64);
    text.parse().or_else(signed).map_err(|_| format!("must be a whole number from {} to {}", i64::MIN, u64::MAX))
}

fn in_range(text: &str, fits: impl Fn(f32) -> bool, rule: &str) -> Result<f32, String> {
    text.parse().ok().filter(|number| fits(*number)).ok_or_else(|| rule.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn parse(arguments: &[&str]) -> Result<Arguments, String> {
        let all = ["tokenrouter"].iter().chain(arguments);
        Arguments::try_parse_from(all).map_err(|e| e.to_string())
    }

    #[test]
    fn consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn a_generate_command() {
        let arguments = parse(&["generate", "c.toml", "--route", "r", "--prompt", "-1 + 2"]).unwrap();
        let Command::Generate(generate) = arguments.command else { panic!() };
        assert_eq!(
            (generate.prompt.as_deref(), generate.max_tokens, generate.sampling.temperature),
            (Some("-1 + 2"), 256, 0.0)
        );
        let arguments = parse(&["generate", "c.toml", "--route", "r", "--prompt-ids", "1,2,3"]).unwrap();
        let Command::Generate(generate) = arguments.command else { panic!() };
        assert_eq!(generate.prompt_ids, Some(vec![1, 2, 3]));
    }

    #[test]
    fn negative_numbers_as_over_http() {
        for (top_k, seed, expected) in [("-1", "-1", (0, u64::MAX)), ("7", "18446744073709551615", (7, u64::MAX))] {
            let more = ["--prompt", "x", "--top-k", top_k, "--seed", seed];
            let arguments = parse(&[&["generate", "c", "--route", "r"], &more[..]].concat()).unwrap();
            let Command::Generate(generate) = arguments.command else { panic!() };
            assert_eq!((generate.sampling.top_k, generate.sampling.seed), expected);
        }
    }

    #[test]
    fn refusals_name_the_rule() {
        let prompt =
            |more: &[&str]| parse(&[&["generate", "c", "--route", "r", "--prompt", "x"], more].concat()).unwrap_err();
        for (more, message) in [
            (["--temperature", "-1"], "must be from 0 to 2"),
            (["--temperature", "nan"], "must be from 0 to 2"),
            (["--top-p", "0"], "must be above 0 and at most 1"),
            (["--top-k", "-2"], "must be from -1 to 4294967295"),
            (["--seed", "-9223372036854775809"], "must be a whole number from -9223372036854775808"),
            (["--max-tokens", "0"], "0 is not in 1..=4294967295"),
            (["--prompt-ids", "1"], "cannot be used with"),
            (["--sead", "1"], "--seed"),
        ] {
            let error = prompt(&more);
            assert!(error.contains(message), "{error}");
        }
        assert!(parse(&["generate", "c", "--route", "r"]).unwrap_err().contains("--prompt"));
    }
}
