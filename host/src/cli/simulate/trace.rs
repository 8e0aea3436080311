//! Traces of arrivals. Pure.

use std::time::Duration;

use crate::simulation::plan::Arrival;

/// A CSV file with the columns `arrival_ms` and, where lengths are known, `prompt_tokens` and `output_tokens`.
pub fn trace(text: &str) -> Result<Vec<Arrival>, String> {
    let mut reader = csv::Reader::from_reader(text.as_bytes());
    let head = reader.headers().map_err(|e| e.to_string())?.clone();
    let column = |name: &str| head.iter().position(|column| column.trim() == name);
    let Some(at) = column("arrival_ms") else { return Err("has no column `arrival_ms`".into()) };
    let (prompt, output) = (column("prompt_tokens"), column("output_tokens"));
    let mut arrivals: Vec<Arrival> = Vec::new();
    for record in reader.records() {
        let record = record.map_err(|e| e.to_string())?;
        let line = record.position().map_or(0, csv::Position::line);
        let cell = |column: usize| record.get(column).unwrap_or_default().trim();
        let tokens = |column: Option<usize>| {
            let Some(column) = column else { return Ok(None) };
            let tokens = cell(column).parse().ok().filter(|tokens| (1..=1 << 30).contains(tokens));
            let name = &head[column];
            tokens
                .map(Some)
                .ok_or_else(|| format!("line {line}: {name} = {:?} must be a number from 1 on", cell(column)))
        };
        let moment: Option<f64> = cell(at).parse().ok().filter(|ms| (0.0..=1e12).contains(ms));
        let moment =
            moment.ok_or_else(|| format!("line {line}: arrival_ms = {:?} must be a time from 0 on", cell(at)))?;
        let moment = Duration::from_secs_f64(moment / 1000.0);
        if arrivals.last().is_some_and(|last| last.at > moment) {
            return Err(format!("line {line}: arrival_ms = {} is before the line above; sort the file", cell(at)));
        }
        arrivals.push(Arrival { at: moment, prompt: tokens(prompt)?, output: tokens(output)? });
    }
    if arrivals.is_empty() { Err("has no requests".into()) } else { Ok(arrivals) }
}
