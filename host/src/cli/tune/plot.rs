//! Predicted throughput over the threshold of a model, as an SVG picture. Pure.

use std::error::Error;

use crate::chart::{self, Line, Panel};

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
    let line = |curve: &Curve| {
        let at = |&(batch, rate): &(u32, f64)| (f64::from(batch), rate);
        let best = curve.points.iter().filter(|(batch, _)| *batch == curve.best);
        Line {
            name: format!("N = {}", curve.requests),
            points: curve.points.iter().map(at).collect(),
            marks: best.map(at).collect(),
        }
    };
    let (x, y) = (format!("min_batch of {model}"), "predicted tokens/s".into());
    let panel = Panel { title: String::new(), x, y, lines: curves.iter().map(line).collect() };
    chart::svg(title, SIZE, (1, 1), &[panel])
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
