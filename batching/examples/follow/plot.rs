//! Bars in groups, as an SVG picture. Pure.

use std::fmt::Write;

pub struct Series<'a> {
    pub name: &'a str,
    /// One for each group.
    pub values: Vec<f64>,
}

const COLOURS: [&str; 4] = ["#999999", "#e69f00", "#009e73", "#0072b2"];
const GROUP: f64 = 76.0;
const LEFT: f64 = 56.0;
const TOP: f64 = 64.0;
const HEIGHT: f64 = 280.0;

/// Bars from 0.9 on, with a line at each tenth.
pub fn bars(title: &str, groups: &[String], series: &[Series]) -> String {
    let top = series.iter().flat_map(|one| &one.values).copied().fold(1.0, f64::max) + 0.05;
    let y = |value: f64| TOP + HEIGHT * (1.0 - (value.max(0.9) - 0.9) / (top - 0.9));
    let right = LEFT + GROUP * groups.len() as f64;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{}\" height=\"{}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"{LEFT}\" y=\"22\" font-size=\"16\">{title}</text>\n",
        right + 16.0,
        TOP + HEIGHT + 56.0
    );
    for (index, (one, colour)) in series.iter().zip(COLOURS).enumerate() {
        let x = LEFT + 180.0 * index as f64;
        let _ = writeln!(
            svg,
            "<rect x=\"{x}\" y=\"36\" width=\"12\" height=\"12\" fill=\"{colour}\"/><text x=\"{}\" y=\"46\">{}</text>",
            x + 18.0,
            one.name
        );
    }
    for tenth in 9..=(top * 10.0) as u32 {
        let (value, at) = (f64::from(tenth) / 10.0, y(f64::from(tenth) / 10.0));
        let _ = writeln!(
            svg,
            "<line x1=\"{LEFT}\" x2=\"{right}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#cccccc\"/>\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{value:.1}</text>",
            LEFT - 6.0,
            at + 4.0
        );
    }
    let width = (GROUP - 16.0) / series.len() as f64;
    for (group, label) in groups.iter().enumerate() {
        let left = LEFT + GROUP * group as f64 + 8.0;
        for (index, (one, colour)) in series.iter().zip(COLOURS).enumerate() {
            let (x, at) = (left + width * index as f64, y(one.values[group]));
            let height = y(0.9) - at;
            let _ = writeln!(
                svg,
                "<rect x=\"{x:.1}\" y=\"{at:.1}\" width=\"{:.1}\" height=\"{height:.1}\" fill=\"{colour}\"/>",
                width - 1.0
            );
        }
        let (middle, below) = (left + (GROUP - 16.0) / 2.0, y(0.9));
        for (line, part) in label.split(", ").enumerate() {
            let at = below + 18.0 + 16.0 * line as f64;
            let _ = writeln!(svg, "<text x=\"{middle:.1}\" y=\"{at:.1}\" text-anchor=\"middle\">{part}</text>");
        }
    }
    svg + "</svg>\n"
}
