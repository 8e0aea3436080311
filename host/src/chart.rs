//! Lines over numbers as SVG pictures. Pure.

use std::error::Error;

use plotters::coord::Shift;
use plotters::coord::ranged1d::Ranged;
use plotters::prelude::*;

/// Told apart by people who see few colours, too (Okabe and Ito).
pub const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(0, 0, 0),
];

pub type Point = (f64, f64);

/// A line without a name has no place in the legend.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Line {
    pub name: String,
    pub points: Vec<Point>,
    /// Points that stand out.
    pub marks: Vec<Point>,
}

/// Lines in one system of coordinates, which begins at 0.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Panel {
    pub title: String,
    pub x: String,
    pub y: String,
    pub lines: Vec<Line>,
}

/// A picture of `panels` in rows and columns, at most `rows` times `columns` of them.
pub fn svg(
    title: &str,
    size: (u32, u32),
    (rows, columns): (usize, usize),
    panels: &[Panel],
) -> Result<String, Box<dyn Error>> {
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        root.fill(&WHITE)?;
        let below = root.titled(title, ("sans-serif", 20))?;
        for (area, panel) in below.split_evenly((rows, columns)).iter().zip(panels) {
            draw(area, panel)?;
        }
        root.present()?;
    }
    Ok(svg)
}

fn draw<B: DrawingBackend>(area: &DrawingArea<B, Shift>, panel: &Panel) -> Result<(), Box<dyn Error>>
where
    B::ErrorType: 'static,
{
    let points = || panel.lines.iter().flat_map(|line| &line.points);
    let right = points().map(|point| point.0).fold(0.0, f64::max);
    let top = points().map(|point| point.1).fold(0.0, f64::max);
    let limit = |most: f64| if most > 0.0 { 1.05 * most } else { 1.0 };
    let mut chart = ChartBuilder::on(area)
        .caption(&panel.title, ("sans-serif", 16))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(56)
        .build_cartesian_2d(0.0..limit(right), 0.0..limit(top))?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .x_desc(&panel.x)
        .y_desc(&panel.y)
        .label_style(("sans-serif", 12))
        .draw()?;
    for (line, colour) in panel.lines.iter().zip(COLOURS.iter().cycle()) {
        let drawn = chart.draw_series(LineSeries::new(line.points.iter().copied(), colour.stroke_width(2)))?;
        if !line.name.is_empty() {
            let key = |(x, y)| PathElement::new(vec![(x, y), (x + 16, y)], colour.stroke_width(2));
            drawn.label(&line.name).legend(key);
        }
        chart.draw_series(line.marks.iter().map(|point| Circle::new(*point, 4, colour.filled())))?;
    }
    if panel.lines.iter().any(|line| !line.name.is_empty()) {
        legend(&mut chart)?;
    }
    Ok(())
}

/// What the lines of a chart are called, in its lower right corner.
pub fn legend<'a, B, X, Y>(chart: &mut ChartContext<'a, B, Cartesian2d<X, Y>>) -> Result<(), Box<dyn Error>>
where
    B: DrawingBackend + 'a,
    B::ErrorType: 'static,
    X: Ranged<ValueType = f64>,
    Y: Ranged<ValueType = f64>,
{
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerRight)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .label_font(("sans-serif", 12))
        .draw()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_and_marks() {
        let line =
            |name: &str| Line { name: name.into(), points: vec![(1.0, 2.0), (3.0, 4.0)], marks: vec![(3.0, 4.0)] };
        let panel = Panel { title: "P <1>".into(), x: "N".into(), y: "y".into(), lines: vec![line("a"), line("")] };
        let svg = svg("t", (400, 300), (1, 2), &[panel, Panel::default()]).unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{svg}");
        assert!(svg.contains("P &lt;1&gt;") && svg.matches("<circle").count() == 2, "{svg}");
    }
}
