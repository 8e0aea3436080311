//! The steps of all models over time: as a trace for Perfetto or Chrome, and as a picture.

use std::error::Error;
use std::time::{Duration, Instant};

use plotters::prelude::*;
use serde_json::{Value, json};

use super::timed::Step;
use crate::chart::COLOURS;

const WIDTH: u32 = 1200;
/// Height of a model's lane, and of what is around the lanes.
const LANE: u32 = 90;
const AROUND: u32 = 120;
/// Share of a lane that the boxes take; the label is above them.
const BOXES: f64 = 0.72;
/// Longest part of a run that is drawn.
const DRAWN: Duration = Duration::from_secs(1);

/// Trace events (<https://ui.perfetto.dev>): one track a model, one event a step. Times are from the first
/// step. `names` and `steps` by model.
pub fn trace(names: &[String], steps: &[Vec<Step>]) -> Value {
    let start = steps.iter().flatten().map(|step| step.start).min();
    let micros = |time: Instant| start.map_or(0.0, |start| 1e6 * (time - start).as_secs_f64());
    let tracks = names
        .iter()
        .enumerate()
        .map(|(track, name)| json!({"ph": "M", "name": "thread_name", "pid": 1, "tid": track, "args": {"name": name}}));
    let events = steps.iter().enumerate().flat_map(|(track, steps)| {
        steps.iter().map(move |step| {
            json!({
                "ph": "X", "name": format!("{} rows", step.rows), "cat": "step", "pid": 1, "tid": track,
                "ts": micros(step.start), "dur": 1e6 * (step.end - step.start).as_secs_f64(),
                "args": {"rows": step.rows, "requests": step.sequences, "sampled": step.sampled},
            })
        })
    });
    json!({"displayTimeUnit": "ms", "traceEvents": tracks.chain(events).collect::<Vec<_>>()})
}

/// A second from the middle of the run as SVG, or all of a shorter one: a lane for each model, a box for each
/// step, as high as the requests in it are many. The first model is at the top.
pub fn svg(title: &str, names: &[String], steps: &[Vec<Step>]) -> Result<String, Box<dyn Error>> {
    let all = || steps.iter().flatten();
    let (Some(first), Some(last)) = (all().map(|s| s.start).min(), all().map(|s| s.end).max()) else {
        return Err("there are no steps to draw".into());
    };
    let drawn = (last - first).min(DRAWN);
    let start = first + (last - first - drawn) / 2;
    let width = 1e3 * drawn.as_secs_f64();
    let at = |time: Instant| 1e3 * time.saturating_duration_since(start).as_secs_f64();
    let shown = |step: &Step| step.end > start && step.start < start + drawn;
    let most = all().filter(|step| shown(step)).map(|step| step.sequences).max().unwrap_or(1).max(1);
    let lanes = names.len();
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (WIDTH, AROUND + LANE * lanes as u32)).into_drawing_area();
        root.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&root)
            .caption(title, ("sans-serif", 18))
            .margin(16)
            .margin_right(28)
            .x_label_area_size(44)
            .build_cartesian_2d(0.0..width, 0.0..lanes as f64)?;
        chart
            .configure_mesh()
            .disable_y_mesh()
            .disable_y_axis()
            .light_line_style(WHITE)
            .x_desc("ms; a box is as high as the requests in the step are many")
            .x_label_formatter(&|ms| format!("{ms:.0}"))
            .label_style(("sans-serif", 14))
            .draw()?;
        for ((lane, (name, steps)), colour) in names.iter().zip(steps).enumerate().zip(COLOURS.iter().cycle()) {
            let floor = (lanes - 1 - lane) as f64;
            // Neighbours differ in shade, so that steps without a gap can be told apart.
            let boxes = steps.iter().enumerate().filter(|(_, step)| shown(step)).map(|(index, step)| {
                let top = floor + BOXES * f64::from(step.sequences) / f64::from(most);
                let shade = if index % 2 == 0 { 1.0 } else { 0.65 };
                Rectangle::new([(at(step.start), floor), (at(step.end).min(width), top)], colour.mix(shade).filled())
            });
            chart.draw_series(boxes)?;
            let within = |step: &Step| step.end.min(start + drawn) - step.start.max(start);
            let busy: Duration = steps.iter().filter(|step| shown(step)).map(within).sum();
            let label = format!("{name}: busy {:.0} %", 100.0 * busy.as_secs_f64() / drawn.as_secs_f64());
            chart.draw_series([Text::new(label, (0.0, floor + 0.97), ("sans-serif", 14))])?;
        }
        root.present()?;
    }
    Ok(svg)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(zero: Instant, count: u64) -> Vec<Step> {
        let at = |ms: u64| zero + Duration::from_millis(ms);
        let step =
            |i| Step { start: at(10 * i), end: at(10 * i + 8), rows: 3, prompt_rows: 0, sequences: 2, sampled: 2 };
        (0..count).map(step).collect()
    }

    #[test]
    fn a_trace_has_every_step() {
        let zero = Instant::now();
        let trace = trace(&["a".into(), "b".into()], &[steps(zero, 3), Vec::new()]);
        let events = trace["traceEvents"].as_array().unwrap();
        assert_eq!(events.len(), 5);
        assert_eq!((&events[1]["args"]["name"], &events[1]["tid"]), (&json!("b"), &json!(1)));
        let event = &events[4];
        assert_eq!((&event["ph"], &event["ts"], &event["dur"]), (&json!("X"), &json!(20_000.0), &json!(8000.0)));
        assert_eq!(event["args"], json!({"rows": 3, "requests": 2, "sampled": 2}));
    }

    #[test]
    fn a_picture_is_of_the_middle_second() {
        let zero = Instant::now();
        let names = ["small".into(), "large".into()];
        let whole = svg("t <1>", &names, &[steps(zero, 50), steps(zero, 1)]).unwrap();
        // Without the background.
        let boxes = |svg: &str| svg.matches("<rect x=").count() - 1;
        assert!(whole.contains("small: busy 80 %") && whole.contains("t &lt;1&gt;"), "{whole}");
        assert_eq!(boxes(&whole), 51);
        let middle = svg("t", &names, &[steps(zero, 300), Vec::new()]).unwrap();
        assert!((100..=102).contains(&(boxes(&middle))), "{}", boxes(&middle));
        assert!(middle.contains("large: busy 0 %"));
        assert!(svg("t", &names, &[Vec::new(), Vec::new()]).is_err());
    }
}
