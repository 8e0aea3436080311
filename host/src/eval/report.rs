//! Results as a table, as JSON and as CSV.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::summary::{Row, Summary};

/// Widest line of a table.
const WIDTH: usize = 100;

/// One line a point, no line wider than a hundred characters. Where names and shares do not fit beside the
/// other numbers they stand on lines of their own.
pub fn table(summaries: &[Summary]) -> String {
    let models = models(summaries);
    let wide = wide(summaries, &models);
    let text = if wide.lines().all(|line| line.chars().count() <= WIDTH) { wide } else { narrow(summaries) };
    text + "accuracy with its 95 % Wilson interval; models: % of all tokens; hand-offs: changes of writer\n\
            per 100 tokens; tokens: mean of an answer\n"
}

/// Every model of any point, in the order in which they are met.
fn models(summaries: &[Summary]) -> Vec<String> {
    let mut models: Vec<String> = Vec::new();
    for name in summaries.iter().flat_map(|summary| &summary.point.models) {
        if !models.contains(name) {
            models.push(name.clone());
        }
    }
    models
}

const NUMBERS: [&str; 5] = ["accuracy % (95 %)", "hand-offs", "tokens", "time s", "tok/s"];

fn numbers(summary: &Summary) -> [String; 5] {
    let (low, high) = summary.accuracy_interval();
    [
        format!("{} ({}–{})", percent(summary.accuracy()), percent(low), percent(high)),
        format!("{:.1}", summary.handoffs_per_100_tokens()),
        format!("{:.1}", summary.mean_tokens()),
        format!("{:.1}", summary.seconds),
        format!("{:.0}", summary.tokens_per_second()),
    ]
}

fn percent(part: f64) -> String {
    format!("{:.1}", 100.0 * part)
}

fn wide(summaries: &[Summary], models: &[String]) -> String {
    let labelled = summaries.iter().any(|summary| !summary.point.label.is_empty());
    let row = |route: &str, label: &str, shares: Vec<String>, numbers: &[String]| {
        let names = if labelled { vec![route.to_owned(), label.to_owned()] } else { vec![route.to_owned()] };
        [&names, &numbers[..1], &shares, &numbers[1..]].concat()
    };
    let mut rows = vec![row("route", "point", models.to_vec(), &NUMBERS.map(String::from))];
    for summary in summaries {
        let shares = models.iter().map(|model| summary.share(model).map_or("-".into(), percent)).collect();
        rows.push(row(&summary.point.route, &summary.point.label, shares, &numbers(summary)));
    }
    aligned(&rows, if labelled { 2 } else { 1 }).concat()
}

fn narrow(summaries: &[Summary]) -> String {
    let mut rows = vec![NUMBERS.map(String::from).to_vec()];
    rows.extend(summaries.iter().map(|summary| numbers(summary).to_vec()));
    let mut lines = aligned(&rows, 0).into_iter();
    let mut text = lines.next().unwrap_or_default();
    for (summary, line) in summaries.iter().zip(lines) {
        let share = |model: &String| format!("{model} {}", summary.share(model).map_or("-".into(), percent));
        let shares = summary.point.models.iter().map(share).collect::<Vec<_>>().join(", ");
        let name = &summary.point.name;
        let joined = format!("{name}  {shares}");
        let fits = joined.chars().count() <= WIDTH;
        for names in if fits { vec![joined] } else { vec![name.clone(), format!("  {shares}")] } {
            text += &clipped(&names);
            text.push('\n');
        }
        text += &line;
    }
    text
}

fn clipped(text: &str) -> String {
    match text.char_indices().nth(WIDTH) {
        Some(_) => text.chars().take(WIDTH - 1).chain(['…']).collect(),
        None => text.into(),
    }
}

/// Lines with columns under each other: the first `left` to the left, the others to the right.
fn aligned(rows: &[Vec<String>], left: usize) -> Vec<String> {
    let columns = rows.iter().map(Vec::len).max().unwrap_or_default();
    let width = |column: usize| rows.iter().filter_map(|row| Some(row.get(column)?.chars().count())).max();
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or_default()).collect();
    let line = |row: &Vec<String>| {
        let cells = row
            .iter()
            .zip(&widths)
            .enumerate()
            .map(|(i, (cell, width))| if i < left { format!("{cell:<width$}") } else { format!("{cell:>width$}") });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    rows.iter().map(line).collect()
}

/// `meta` with the points.
pub fn json(meta: Value, summaries: &[Summary]) -> Value {
    json!({"meta": meta, "points": summaries.iter().map(point_json).collect::<Vec<_>>()})
}

fn point_json(summary: &Summary) -> Value {
    let (low, high) = summary.accuracy_interval();
    let by_model = |of: &dyn Fn(&str, u64) -> Value| -> Map<String, Value> {
        summary.tokens_by_model.iter().map(|(model, tokens)| (model.clone(), of(model, *tokens))).collect()
    };
    json!({
        "route": summary.point.route,
        "point": summary.point.label,
        "settings": summary.point.settings,
        "accuracy": summary.accuracy(),
        "accuracy_low": low,
        "accuracy_high": high,
        "correct": summary.correct,
        "questions": summary.questions,
        "token_share": by_model(&|model, _| json!(summary.share(model))),
        "tokens_by_model": by_model(&|_, tokens| tokens.into()),
        "mean_tokens": summary.mean_tokens(),
        "handoffs_per_100_tokens": summary.handoffs_per_100_tokens(),
        "switches_per_request": summary.switches_per_request(),
        "seconds": summary.seconds,
        "tokens_per_second": summary.tokens_per_second(),
        "finish_reasons": summary.finish_reasons,
    })
}

/// One line a point, with a header. Columns for a model or a finish reason that a point does not have are
/// empty there.
pub fn csv(summaries: &[Summary]) -> Result<Vec<u8>, csv::Error> {
    let models = models(summaries);
    let reasons: BTreeSet<&String> = summaries.iter().flat_map(|summary| summary.finish_reasons.keys()).collect();
    let mut writer = csv::Writer::from_writer(Vec::new());
    let fixed = "route,point,settings,questions,correct,accuracy,accuracy_low,accuracy_high,mean_tokens,\
                 handoffs_per_100_tokens,switches_per_request,seconds,tokens_per_second";
    let mut header: Vec<String> = fixed.split(',').map(String::from).collect();
    header.extend(models.iter().flat_map(|model| [format!("tokens_{model}"), format!("token_share_{model}")]));
    header.extend(reasons.iter().map(|reason| format!("finish_{reason}")));
    writer.write_record(&header)?;
    for summary in summaries {
        let (low, high) = summary.accuracy_interval();
        let mut record = vec![summary.point.route.clone(), summary.point.label.clone()];
        record.push(if summary.point.is_bare() { String::new() } else { summary.point.settings.to_string() });
        record.extend([summary.questions, summary.correct].map(|count| count.to_string()));
        record.extend(
            [
                summary.accuracy(),
                low,
                high,
                summary.mean_tokens(),
                summary.handoffs_per_100_tokens(),
                summary.switches_per_request(),
                summary.seconds,
                summary.tokens_per_second(),
            ]
            .map(|number| number.to_string()),
        );
        for model in &models {
            let tokens = summary.tokens_by_model.iter().find(|(name, _)| name == model);
            record.push(tokens.map_or(String::new(), |(_, tokens)| tokens.to_string()));
            record.push(summary.share(model).map_or(String::new(), |share| share.to_string()));
        }
        let count = |reason: &&String| summary.finish_reasons.get(*reason).copied().unwrap_or_default().to_string();
        record.extend(reasons.iter().map(count));
        writer.write_record(&record)?;
    }
    writer.into_inner().map_err(|e| e.into_error().into())
}

/// One JSON object a line for each row.
pub fn details(rows: &[Row]) -> Result<String, serde_json::Error> {
    rows.iter().map(|row| Ok(serde_json::to_string(row)? + "\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::super::summary::tests::{point, row};
    use super::*;

    fn summaries() -> Vec<Summary> {
        let routed = point("rstitch", "threshold=0.03", &["small", "large"]);
        let bare = point("large", "", &["large"]);
        let rows = [row(&routed, 0, true, &[60, 5], 4), row(&routed, 1, false, &[58, 7], 6)];
        vec![Summary::new(&routed, &rows), Summary::new(&bare, &[row(&bare, 0, true, &[64], 0)])]
    }

    #[test]
    fn the_table() {
        let text = table(&summaries());
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[..3],
            [
                "route    point            accuracy % (95 %)  small  large  hand-offs  tokens  time s  tok/s",
                "rstitch  threshold=0.03     50.0 (9.5–90.5)   90.8    9.2        7.7    65.0     2.0     65",
                "large                    100.0 (20.7–100.0)      -  100.0        0.0    64.0     1.0     64",
            ]
        );
        assert!(lines.iter().all(|line| line.chars().count() <= 100), "{text}");
        let text = table(&summaries()[1..]);
        assert!(text.starts_with("route   accuracy % (95 %)  large  hand-offs"), "{text}");
    }

    #[test]
    fn long_names_stand_alone() {
        let long = "x".repeat(128);
        let routed = point("me", "weights={small=0.5,medium=0.3,large=0.2}", &["small", "medium", "large", &long]);
        let text = table(&[Summary::new(&routed, &[row(&routed, 0, true, &[5, 3, 2, 10], 4)])]);
        assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
        assert!(text.contains("\nme[weights={small=0.5,medium=0.3,large=0.2}]\n"), "{text}");
        assert!(text.contains("\n  small 25.0, medium 15.0, large 10.0, xxx"), "{text}");
        let label = format!("weights={{small=0.5,medium=0.3,large=0.2,{}}}", "x".repeat(9));
        let routed = point("me", &label, &["small", "medium", "large"]);
        let text = table(&[Summary::new(&routed, &[row(&routed, 0, true, &[5, 3, 2], 4)])]);
        assert!(text.contains(&format!("\nme[{label}]  small 50.0, medium 30.0, large 20.0\n")), "{text}");
    }

    #[test]
    fn as_json() {
        let value = json(json!({"version": "1"}), &summaries());
        let first = &value["points"][0];
        assert_eq!((&value["meta"]["version"], &first["route"]), (&json!("1"), &json!("rstitch")));
        assert_eq!(first["token_share"], json!({"small": 118.0 / 130.0, "large": 12.0 / 130.0}));
        assert_eq!(first["tokens_by_model"], json!({"small": 118, "large": 12}));
        assert_eq!((&first["accuracy"], &first["correct"], &first["questions"]), (&json!(0.5), &json!(1), &json!(2)));
        assert_eq!((&first["mean_tokens"], &first["switches_per_request"]), (&json!(65.0), &json!(5.0)));
        assert_eq!(first["finish_reasons"], json!({"stop": 2}));
        assert_eq!(value["points"][1]["settings"], Value::Null);
    }

    #[test]
    fn as_csv() {
        let bytes = csv(&summaries()).unwrap();
        let mut reader = csv::Reader::from_reader(bytes.as_slice());
        let header = reader.headers().unwrap().clone();
        let records: Vec<_> = reader.records().map(Result::unwrap).collect();
        let cell = |record: usize, name: &str| {
            records[record].get(header.iter().position(|column| column == name).unwrap()).unwrap().to_owned()
        };
        assert_eq!(records.len(), 2);
        assert_eq!(
            (cell(0, "point"), cell(0, "settings"), cell(0, "tokens_large")),
            ("threshold=0.03".into(), "{}".into(), "12".into())
        );
        assert_eq!((cell(1, "token_share_small"), cell(1, "token_share_large")), (String::new(), "1".into()));
        assert_eq!((cell(1, "finish_stop"), cell(1, "settings")), ("1".into(), String::new()));
    }
}
