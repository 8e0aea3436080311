//! Predicted throughput over the threshold of a model, as an SVG picture. Pure.

use std::error::Error;

use plotters::prelude::*;

use crate::eval::plot::COLOURS;

const SIZE: (u32, u32) = (800, 560);

/// One number of requests.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve {
    pub requests: usize,
    /// Threshold and tokens a second, by threshold.
    pub points: Vec<(u32, f64)>,
    /// The threshold that was chosen.
    pub best: u32,
}

/// A line for each curve, with a mark at its best threshold. `model`: whose threshold it is.
pub fn svg(title: &str, model: &str, curves: &[Curve]) -> Result<String, Box<dyn Error>> {
    let points = || curves.iter().flat_map(|curve| &curve.points);
    let right = points().map(|(b, _)| *b).max().unwrap_or(1);
    let top = points().map(|(_, rate)| *rate).fold(0.0, f64::max);
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        root.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&root)
            .caption(title, ("sans-serif", 18))
            .margin(16)
            .x_label_area_size(44)
            .y_label_area_size(64)
            .build_cartesian_2d(0.0..f64::from(right) * 1.04 + 0.5, 0.0..1.05 * top)?;
        chart
            .configure_mesh()
            .light_line_style(WHITE)
            .x_desc(format!("min_batch of {model}"))
            .y_desc("predicted tokens/s")
            .label_style(("sans-serif", 14))
            .x_label_formatter(&|x| format!("{x:.0}"))
            .y_label_formatter(&|y| format!("{y:.0}"))
            .draw()?;
        for (curve, colour) in curves.iter().zip(COLOURS.iter().cycle()) {
            let line: Vec<(f64, f64)> = curve.points.iter().map(|(b, rate)| (f64::from(*b), *rate)).collect();
            let best = line.iter().filter(|(b, _)| *b == f64::from(curve.best)).copied();
            let best: Vec<(f64, f64)> = best.collect();
            chart
                .draw_series(LineSeries::new(line, colour.stroke_width(2)))?
                .label(format!("N = {}", curve.requests))
                .legend(|(x, y)| PathElement::new(vec![(x, y), (x + 18, y)], colour.stroke_width(2)));
            chart.draw_series(best.into_iter().map(|at| Circle::new(at, 4, colour.filled())))?;
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::LowerRight)
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK.mix(0.3))
            .label_font(("sans-serif", 14))
            .draw()?;
        root.present()?;
    }
    Ok(svg)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_and_marks() {
        let curve = |requests, best| Curve { requests, points: (1..=4).map(|b| (b, f64::from(b))).collect(), best };
        let svg = svg("a <b>", "large", &[curve(4, 3), curve(8, 4)]).unwrap();
        for part in ["min_batch of large", "predicted tokens/s", "a &lt;b&gt;", "N = 8", "<polyline"] {
            assert!(svg.contains(part), "{part}: {svg}");
        }
        assert_eq!(svg.matches("<circle").count(), 2, "{svg}");
    }
}
