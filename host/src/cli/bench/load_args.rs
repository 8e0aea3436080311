//! What can be written about a load.

use std::path::PathBuf;

use clap::Args;

use super::variant::Mode;
use crate::bench::goodput::Limit;
use crate::bench::workload::Length;

/// A load on a route, in this process or of a server
#[derive(Clone, Debug, Args)]
pub struct LoadArgs {
    /// Configuration file (TOML), for a load on one of its routes in this process
    #[arg(requires_all = ["route", "pace"])]
    pub config: Option<PathBuf>,
    /// Two configurations to compare on one route: their loads are run in turns. `standard-serving:FILE`
    /// for one in that mode
    #[arg(long, value_names = ["A", "B"], num_args = 2, requires_all = ["route", "pace"], conflicts_with_all = ["mode", "csv", "plot", "timeline", "timeline_svg"])]
    pub compare: Vec<String>,
    /// Compare what is done without a router with all that the engine has, adding one thing at a time: prefix cache,
    /// resident K/V, asynchrony, delayed batching
    #[arg(long, requires = "config", conflicts_with_all = ["url", "compare", "alone", "mode", "csv", "plot", "timeline", "timeline_svg"])]
    pub ablation: bool,
    /// Measure throughput for each threshold (min_batch) of this model from 1 to N, those of the others at 1, against
    /// what the chain predicts from the same steps
    #[arg(long, value_name = "MODEL", requires_all = ["config", "requests"], conflicts_with_all = ["rate", "url", "compare", "ablation", "alone", "mode", "csv", "timeline", "timeline_svg", "max_seconds"])]
    pub sweep: Option<String>,
    /// With --compare, --ablation and --sweep: how often each is run [default: 3]
    #[arg(long, value_name = "R", conflicts_with_all = ["url", "alone"], value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: Option<u32>,
    /// How the models are put together
    #[arg(long, value_enum, default_value_t = Mode::Routed, requires = "config", conflicts_with_all = ["url", "alone"])]
    pub mode: Mode,
    /// Route or model that answers
    #[arg(long, value_name = "NAME", requires = "target", conflicts_with_all = ["url", "alone"])]
    pub route: Option<String>,
    /// Server with OpenAI's API to put the load on, such as http://127.0.0.1:30000
    #[arg(long, value_name = "URL", requires = "pace")]
    pub url: Option<String>,
    /// With --url: the `model` to ask for [default: the only one that the server has]
    #[arg(long, value_name = "NAME", requires = "url", conflicts_with_all = ["config", "compare", "alone"])]
    pub model: Option<String>,
    /// With --url: key for the server
    #[arg(long, value_name = "KEY", env = "OPENAI_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// With --url: random prompts are made of token ids below this
    #[arg(long, value_name = "V", requires = "url", conflicts_with_all = ["config", "compare", "alone"], value_parser = clap::value_parser!(u32).range(1..))]
    pub vocab_size: Option<u32>,
    /// Closed load: requests that are always under way; several numbers are measured one after the other
    #[arg(long, value_name = "N,…", value_delimiter = ',', group = "pace", requires = "target", conflicts_with = "alone", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub requests: Vec<u32>,
    /// Open load: requests that arrive a second, `inf` for all at once; several are measured one after the other
    #[arg(long, value_name = "R,…", value_delimiter = ',', group = "pace", requires = "target", conflicts_with = "alone", value_parser = rate)]
    pub rate: Vec<f64>,
    /// With --rate: shape of the gamma distribution of the gaps; 1 is a Poisson process, less is bursts, more is
    /// more even
    #[arg(long, value_name = "B", default_value_t = 1.0, requires = "rate", conflicts_with_all = ["requests", "alone"], value_parser = burstiness)]
    pub burstiness: f64,
    /// With --rate: requests under way at most; others wait, and that is told
    #[arg(long, value_name = "C", requires = "rate", conflicts_with_all = ["requests", "alone"], value_parser = clap::value_parser!(u32).range(1..))]
    pub max_concurrency: Option<u32>,
    /// Requests of each load in all; a session of several turns counts as one [default: the data set, else 2 N]
    #[arg(long, value_name = "T", requires = "target", conflicts_with = "alone", value_parser = clap::value_parser!(u32).range(1..))]
    pub total: Option<u32>,
    /// Break each load, and the warm-up, off after so many seconds; throughput is then over what was written until then
    #[arg(long, value_name = "S", requires = "target", conflicts_with = "alone", value_parser = seconds)]
    pub max_seconds: Option<f64>,
    /// Requests as JSON lines, see below [default: random prompts]
    #[arg(long, value_name = "FILE", requires = "target", conflicts_with = "alone")]
    pub dataset: Option<PathBuf>,
    /// Tokens of each random prompt, or drawn from L-S to L+S
    #[arg(long, value_name = "L[:S]", default_value = "1024", conflicts_with = "alone")]
    pub input_len: Length,
    /// Tokens that all random prompts have before their own
    #[arg(long, value_name = "P", default_value_t = 0, conflicts_with = "alone")]
    pub prefix_len: u32,
    /// With --prefix-len: each load has K prefixes of its own, which its requests have in turns, so that the first of
    /// each is cold [default: one for all loads, which the warm-up leaves in the cache]
    #[arg(long, value_name = "K", requires = "prefix_len", conflicts_with_all = ["alone", "sweep"], value_parser = clap::value_parser!(u32).range(1..))]
    pub prefixes: Option<u32>,
    /// Sessions of random prompts in place of single ones: in each so many turns, of --input-len new tokens behind the
    /// answers before
    #[arg(long, value_name = "T", default_value_t = 1, conflicts_with_all = ["alone", "url", "dataset"], value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub turns: u32,
    /// Tokens of each answer, or drawn from L-S to L+S; end tokens do not end it
    #[arg(long, value_name = "L[:S]", requires = "target", conflicts_with = "alone")]
    pub output_len: Option<Length>,
    /// Short requests before the first load, one after the other, that are not counted
    #[arg(long, value_name = "W", default_value_t = 1, conflicts_with = "alone")]
    pub warm_up: u32,
    /// Prompts and draws of request i come from seed + i, arrivals from the seed
    #[arg(long, value_name = "S", default_value_t = 0)]
    pub seed: u64,
    /// Count requests within all limits, in ms: ttft:MS, tpot:MS, e2e:MS
    #[arg(long, value_name = "METRIC:MS", num_args = 1.., requires = "target", conflicts_with = "alone")]
    pub goodput: Vec<Limit>,
    /// Write each request as CSV
    #[arg(long, value_name = "FILE", requires = "target", conflicts_with = "alone")]
    pub csv: Option<PathBuf>,
    /// Draw throughput, latencies and batches (SVG)
    #[arg(long, value_name = "FILE", requires = "target", conflicts_with = "alone")]
    pub plot: Option<PathBuf>,
    /// Write the steps of the last load as a trace for ui.perfetto.dev
    #[arg(long, value_name = "FILE", requires = "config", conflicts_with_all = ["url", "alone"])]
    pub timeline: Option<PathBuf>,
    /// Draw a second from the middle of the last load (SVG)
    #[arg(long, value_name = "FILE", requires = "config", conflicts_with_all = ["url", "alone"])]
    pub timeline_svg: Option<PathBuf>,
}

fn rate(text: &str) -> Result<f64, String> {
    let number: Option<f64> = text.parse().ok();
    let fits = |rate: &f64| (1e-3..=1e6).contains(rate) || *rate == f64::INFINITY;
    number.filter(fits).ok_or_else(|| "must be from 0.001 to 1000000, or inf".into())
}

fn seconds(text: &str) -> Result<f64, String> {
    let number: Option<f64> = text.parse().ok();
    number.filter(|seconds| (0.1..=1e6).contains(seconds)).ok_or_else(|| "must be seconds, from 0.1 to 1000000".into())
}

fn burstiness(text: &str) -> Result<f64, String> {
    let number: Option<f64> = text.parse().ok();
    let fits = |shape: &f64| (1e-2..=1e6).contains(shape) || *shape == f64::INFINITY;
    number.filter(fits).ok_or_else(|| "must be from 0.01 to 1000000, or inf".into())
}
