//! Accuracy against the share of the large model, as an SVG picture.

use std::error::Error;

use plotters::prelude::*;

use super::summary::Summary;
use crate::chart::{COLOURS, legend};

const SIZE: (u32, u32) = (800, 560);
/// Longest label beside a point, in characters.
const LABEL: usize = 16;

/// A line, or a single point.
struct Series<'a> {
    name: &'a str,
    /// In the order of the share.
    points: Vec<Mark<'a>>,
}

struct Mark<'a> {
    /// All in percent.
    share: f64,
    accuracy: f64,
    low: f64,
    high: f64,
    label: &'a str,
}

/// One line for each route, through its points, and a point for each model alone; bars are the 95 %
/// intervals. A model alone is at 100 % if it is the last model of a route, or if there are no routes.
pub fn svg(title: &str, summaries: &[Summary]) -> Result<String, Box<dyn Error>> {
    let series = series(summaries);
    let marks = || series.iter().flat_map(|series| &series.points);
    let right = marks().map(|mark| mark.share).fold(1.0, f64::max);
    let bottom = marks().map(|mark| mark.low).fold(100.0, f64::min);
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        root.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&root)
            .caption(title, ("sans-serif", 18))
            .margin(16)
            .x_label_area_size(44)
            .y_label_area_size(52)
            .build_cartesian_2d(-0.02 * right..1.08 * right, (bottom - 3.0).max(-1.0)..101.0)?;
        chart
            .configure_mesh()
            .light_line_style(WHITE)
            .x_desc(format!("tokens by {} (%)", large_name(summaries)))
            .y_desc("accuracy (%)")
            .label_style(("sans-serif", 14))
            .x_label_formatter(&|x| format!("{}", tidy(*x)))
            .y_label_formatter(&|y| format!("{}", tidy(*y)))
            .draw()?;
        for (series, colour) in series.iter().zip(COLOURS.iter().cycle()) {
            let line: Vec<(f64, f64)> = series.points.iter().map(|mark| (mark.share, mark.accuracy)).collect();
            chart
                .draw_series(LineSeries::new(line, colour.stroke_width(2)))?
                .label(series.name)
                .legend(|(x, y)| PathElement::new(vec![(x, y), (x + 18, y)], colour.stroke_width(2)));
            let bar =
                |mark: &Mark| PathElement::new(vec![(mark.share, mark.low), (mark.share, mark.high)], colour.mix(0.5));
            chart.draw_series(series.points.iter().map(bar))?;
            chart.draw_series(
                series.points.iter().map(|mark| Circle::new((mark.share, mark.accuracy), 4, colour.filled())),
            )?;
            let text = |mark: &Mark| {
                EmptyElement::at((mark.share, mark.accuracy))
                    + Text::new(mark.label.to_owned(), (7, 5), ("sans-serif", 12))
            };
            chart.draw_series(series.points.iter().filter(|mark| !mark.label.is_empty()).map(text))?;
        }
        legend(&mut chart)?;
        root.present()?;
    }
    Ok(svg)
}

/// Without the noise of binary fractions.
fn tidy(number: f64) -> f64 {
    // Adding 0 makes the negative zero positive.
    (number * 100.0).round() / 100.0 + 0.0
}

/// The last model of the routes, if it is the same for all.
fn large_name(summaries: &[Summary]) -> &str {
    let mut last = summaries.iter().filter(|summary| !summary.point.is_bare()).filter_map(|s| s.point.models.last());
    match last.next() {
        Some(name) if last.all(|other| other == name) => name,
        _ => "the large model",
    }
}

fn series(summaries: &[Summary]) -> Vec<Series<'_>> {
    let routed = || summaries.iter().filter(|summary| !summary.point.is_bare());
    let mut series: Vec<Series<'_>> = Vec::new();
    for summary in summaries {
        let point = &summary.point;
        let is_large =
            || routed().count() == 0 || routed().any(|routed| routed.point.models.last() == point.models.last());
        let share = match point.is_bare() {
            true if is_large() => 1.0,
            true => 0.0,
            false => summary.large_share(),
        };
        let (low, high) = summary.accuracy_interval();
        let mark = Mark {
            share: 100.0 * share,
            accuracy: 100.0 * summary.accuracy(),
            low: 100.0 * low,
            high: 100.0 * high,
            label: label(&point.label),
        };
        match series.iter_mut().find(|series| series.name == point.route) {
            Some(series) => series.points.push(mark),
            None => series.push(Series { name: &point.route, points: vec![mark] }),
        }
    }
    for series in &mut series {
        series.points.sort_by(|a, b| a.share.total_cmp(&b.share));
    }
    series
}

/// The value alone where one setting is swept; nothing where it would be too long.
fn label(label: &str) -> &str {
    let short = match label.split_once('=') {
        Some((_, value)) if !value.contains('=') => value,
        _ => label,
    };
    if short.chars().count() <= LABEL { short } else { "" }
}

#[cfg(test)]
mod tests {
    use super::super::summary::tests::{point, row};
    use super::*;

    fn summary(route: &str, label: &str, models: &[&str], tokens: &[u64]) -> Summary {
        let point = point(route, label, models);
        Summary::new(&point, &[row(&point, 0, true, tokens, 1), row(&point, 1, false, tokens, 1)])
    }

    #[test]
    fn lines_and_points() {
        let pair = ["small", "large"];
        let summaries = [
            summary("r", "threshold=0.5", &pair, &[1, 3]),
            summary("r", "threshold=0.7", &pair, &[3, 1]),
            summary("large", "", &["large"], &[9]),
            summary("small", "", &["small"], &[9]),
        ];
        let seen: Vec<(&str, Vec<(f64, &str)>)> = series(&summaries)
            .into_iter()
            .map(|series| (series.name, series.points.iter().map(|mark| (mark.share, mark.label)).collect()))
            .collect();
        assert_eq!(
            seen,
            [("r", vec![(25.0, "0.7"), (75.0, "0.5")]), ("large", vec![(100.0, "")]), ("small", vec![(0.0, "")])]
        );
        let svg = svg("d.jsonl <1>", &summaries).unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{svg}");
        for part in ["tokens by large (%)", "accuracy (%)", "d.jsonl &lt;1&gt;", "0.5", "<polyline"] {
            assert!(svg.contains(part), "{part}: {svg}");
        }
        assert_eq!(svg.matches("<circle").count(), 4, "{svg}");
    }

    #[test]
    fn models_alone() {
        let summaries = [summary("a", "", &["a"], &[1]), summary("b", "", &["b"], &[1])];
        assert!(series(&summaries).iter().all(|series| series.points[0].share == 100.0));
        assert!(svg("t", &summaries).unwrap().contains("tokens by the large model (%)"));
    }

    #[test]
    fn short_labels() {
        assert_eq!(label("threshold=0.5"), "0.5");
        assert_eq!(label("a=1,b=2"), "a=1,b=2");
        assert_eq!(label("weights={small=0.5,large=0.5}"), "");
    }
}
