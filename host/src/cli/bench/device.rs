//! `--kernels` and `--steps`

use serde_json::json;

use super::super::output::{Failure, write_stdout};
use super::args::Bench;
use super::device_report::{Ceilings, heading, kernel_table, prefill_table, step_table};
use super::write_json;
use crate::bench::device::REPLAYS;
use crate::bench::kernels::{Kernels, MAX_STEP_ROWS, kernels};
use crate::bench::steps::{Steps, steps};
use crate::runner::cuda::measure::Bandwidth;
use crate::runner::cuda::{self, Dtype};
use crate::runner::model_config::ModelConfig;
use crate::runner::model_config::shapes::{self, Shape};

/// Shapes where none is named.
const USUAL_SHAPES: [&str; 3] = ["qwen3-0.6b", "qwen3-8b", "qwen3-32b"];
/// Rows of `--steps` where none are given.
const STEP_ROWS: [u32; 6] = [1, 2, 4, 8, 16, 32];

pub(super) fn run(arguments: &Bench) -> Result<(), Failure> {
    let ordinal = arguments.device;
    check(arguments).map_err(Failure::input)?;
    let info = cuda::device(ordinal).map_err(|e| Failure::input(format!("--device cuda:{ordinal}: {e}")))?;
    let bandwidth = Bandwidth::measure(ordinal, REPLAYS).map_err(Failure::work)?;
    let ceilings = Ceilings { bandwidth, flops: arguments.flops };
    write_stdout(&heading(&info, &ceilings))?;
    let shapes = if arguments.shapes.is_empty() {
        USUAL_SHAPES.iter().filter_map(|name| shapes::find(name)).collect()
    } else {
        arguments.shapes.clone()
    };
    let mut results = Vec::new();
    for shape in shapes {
        let config = shape.config(None).map_err(Failure::input)?;
        let (text, result) = if arguments.kernels {
            measure_kernels(arguments, shape, &config, &ceilings)?
        } else {
            measure_steps(arguments, shape, &config, &ceilings)?
        };
        write_stdout(&format!("\n{text}"))?;
        results.push(result);
    }
    let Some(file) = &arguments.json else { return Ok(()) };
    let dtype = match arguments.dtype.into() {
        Dtype::Bf16 => "bf16",
        Dtype::F32 => "f32",
    };
    let all = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "device": info.name,
        "dtype": dtype,
        "replays": REPLAYS,
        "bytes_per_second": bandwidth,
        "flops": arguments.flops,
        "shapes": results,
    });
    write_json("--json", file, &all)
}

/// What the flags cannot say together.
fn check(arguments: &Bench) -> Result<(), String> {
    let rows = arguments.rows.iter().find(|rows| arguments.steps && **rows > MAX_STEP_ROWS);
    if let Some(rows) = rows {
        return Err(format!(
            "--rows: a step has at most {MAX_STEP_ROWS} rows, not {rows}; measure a prompt with --prefill"
        ));
    }
    let rows = or(&arguments.rows, &STEP_ROWS);
    if let Some(each) = arguments.extend.filter(|each| !rows.iter().any(|rows| rows.is_multiple_of(*each))) {
        return Err(format!("--extend: no number of --rows is a multiple of {each}; add {each} to --rows"));
    }
    if arguments.prefill.is_some() && Dtype::from(arguments.dtype) != Dtype::Bf16 {
        return Err("--prefill: the parts of a prompt are measured in bf16 only; leave --dtype out".into());
    }
    Ok(())
}

type Measured = (String, serde_json::Value);

fn or<'a>(given: &'a [u32], usual: &'a [u32]) -> &'a [u32] {
    if given.is_empty() { usual } else { given }
}

fn measure_kernels(
    arguments: &Bench,
    shape: &'static Shape,
    config: &ModelConfig,
    ceilings: &Ceilings,
) -> Result<Measured, Failure> {
    let what = Kernels {
        ordinal: arguments.device,
        contexts: or(&arguments.context_len, &[1024, 8192]),
        rows: or(&arguments.rows, &[1, 8, 16, 32, 64, 2048]),
    };
    let times = kernels(shape.name, config, &what).map_err(Failure::work)?;
    Ok((kernel_table(&times, ceilings), json!(times)))
}

fn measure_steps(
    arguments: &Bench,
    shape: &'static Shape,
    config: &ModelConfig,
    ceilings: &Ceilings,
) -> Result<Measured, Failure> {
    let what = Steps {
        ordinal: arguments.device,
        dtype: arguments.dtype.into(),
        contexts: or(&arguments.context_len, &[1024]),
        rows: or(&arguments.rows, &STEP_ROWS),
        extend: arguments.extend,
        prefill: arguments.prefill,
    };
    let times = steps(shape.name, config, &what).map_err(Failure::work)?;
    let mut text = step_table(&times, ceilings);
    if let Some(prefill) = &times.prefill {
        text += &format!("\n{}", prefill_table(times.shape, prefill, ceilings));
    }
    Ok((text, json!(times)))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::super::super::args::{Arguments, Command};
    use super::*;

    #[test]
    fn what_cannot_be_measured_is_refused() {
        let checked = |more: &[&str]| {
            let all = ["tokenrouter", "bench"].iter().chain(more);
            match Arguments::try_parse_from(all).unwrap().command {
                Command::Bench(bench) => check(&bench),
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(checked(&["--steps", "--rows", "1,64", "--prefill", "8192"]), Ok(()));
        assert_eq!(checked(&["--kernels", "--rows", "2048"]), Ok(()));
        let error = checked(&["--steps", "--rows", "1,65"]).unwrap_err();
        assert_eq!(error, "--rows: a step has at most 64 rows, not 65; measure a prompt with --prefill");
        assert_eq!(checked(&["--steps", "--extend", "4"]), Ok(()));
        let error = checked(&["--steps", "--rows", "1,6", "--extend", "4"]).unwrap_err();
        assert_eq!(error, "--extend: no number of --rows is a multiple of 4; add 4 to --rows");
        assert!(checked(&["--steps", "--dtype", "f32", "--prefill", "9"]).unwrap_err().contains("bf16 only"));
    }
}
