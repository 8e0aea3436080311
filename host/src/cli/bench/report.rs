//! The tables of a load. Pure.

use super::super::plan::table;
use crate::bench::load::Pace;
use crate::bench::statistics::Distribution;
use crate::bench::summary::Summary;

/// Failures that are shown, of each load.
const FAILURES: usize = 3;

/// A row for each load; its latencies; its models; what the prefix cache gave; what was broken off; and why requests failed, if any did.
pub fn tables(summaries: &[&Summary]) -> String {
    let parts = [
        loads(summaries),
        latencies(summaries),
        models(summaries),
        by_cache(summaries),
        cut(summaries),
        failures(summaries),
    ];
    parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("\n")
}

fn loads(summaries: &[&Summary]) -> String {
    let head = ["load", "of", "failed", "requests/s", "tokens/s", "all/s", "decode", "goodput", "handoffs", "cached"];
    let mut rows = vec![head.map(String::from)];
    let optional = |value: Option<f64>, digits: usize| value.map_or("-".into(), |value| format!("{value:.digits$}"));
    rows.extend(summaries.iter().map(|summary| {
        let all = (summary.prompt_tokens + summary.tokens) as f64;
        [
            summary.pace.to_string(),
            summary.total().to_string(),
            summary.failed.to_string(),
            format!("{:.2}", summary.requests_per_second),
            format!("{:.1}", summary.tokens_per_second),
            format!("{:.1}", if summary.seconds > 0.0 { all / summary.seconds } else { 0.0 }),
            optional(summary.decode_tokens_per_second, 1),
            optional(summary.goodput, 2),
            summary.handoffs.map_or("-".into(), |handoffs| handoffs.to_string()),
            summary.cached_tokens.map_or("-".into(), |cached| {
                format!("{:.1} %", 100.0 * cached as f64 / summary.prompt_tokens.max(1) as f64)
            }),
        ]
    }));
    table(&rows, 0)
}

fn latencies(summaries: &[&Summary]) -> String {
    let mut rows = vec![["load", "ms", "mean", "p50", "p90", "p95", "p99"].map(String::from)];
    for summary in summaries {
        let open = matches!(summary.pace, Pace::Open { .. }).then_some(("late", summary.late_ms));
        let flow = summary.flow.iter().flat_map(|flow| [("queue", flow.queue_ms), ("hand-off", flow.handoff_ms)]);
        let by_cache = summary.by_cache.iter().flat_map(|by| [("TTFT cold", by.cold), ("TTFT warm", by.warm)]);
        let times =
            [("TTFT", summary.ttft_ms), ("TPOT", summary.tpot_ms), ("ITL", summary.itl_ms), ("E2E", summary.e2e_ms)];
        rows.extend(
            times.into_iter().chain(by_cache).chain(open).chain(flow).map(|(name, time)| latency(summary, name, time)),
        );
    }
    table(&rows, 2)
}

fn latency(summary: &Summary, name: &str, time: Distribution) -> [String; 7] {
    let Distribution { mean, p50, p90, p95, p99, .. } = time;
    let [mean, p50, p90, p95, p99] = [mean, p50, p90, p95, p99].map(|ms| format!("{ms:.2}"));
    [summary.pace.to_string(), name.into(), mean, p50, p90, p95, p99]
}

fn models(summaries: &[&Summary]) -> String {
    if summaries.iter().all(|summary| summary.models.is_empty()) {
        return tokens_by_model(summaries);
    }
    let head = [
        "load", "model", "tokens", "steps", "batch", "fill", "rows", "step p50", "p99 ms", "busy", "gap p50", "p90 µs",
    ];
    let mut rows = vec![head.map(String::from)];
    for summary in summaries {
        rows.extend(summary.models.iter().map(|model| {
            let [gap, gap_90] =
                model.gap_us.map_or(["-", "-"].map(String::from), |gaps| gaps.map(|gap| format!("{gap:.1}")));
            let percent = |share: f64| format!("{:.1} %", 100.0 * share);
            [
                summary.pace.to_string(),
                model.name.clone(),
                percent(model.share),
                model.steps.to_string(),
                format!("{:.2}", model.mean_batch),
                percent(model.fill),
                format!("{:.2}", model.mean_rows),
                format!("{:.3}", model.step_ms.p50),
                format!("{:.3}", model.step_ms.p99),
                percent(model.busy),
                gap,
                gap_90,
            ]
        }));
    }
    table(&rows, 2)
}

/// Of a server that tells who wrote.
fn tokens_by_model(summaries: &[&Summary]) -> String {
    let mut rows = vec![["load", "model", "tokens"].map(String::from)];
    for summary in summaries {
        let share = |tokens: u64| format!("{:.1} %", 100.0 * tokens as f64 / summary.tokens.max(1) as f64);
        let models = summary.by_model.iter();
        rows.extend(models.map(|(name, tokens)| [summary.pace.to_string(), name.clone(), share(*tokens)]));
    }
    if rows.len() > 1 { table(&rows, 2) } else { String::new() }
}

fn by_cache(summaries: &[&Summary]) -> String {
    let told = summaries.iter().filter_map(|summary| Some((summary.pace, summary.by_cache?))).map(|(pace, by)| {
        format!(
            "{pace}: median TTFT of the {} warm requests is {:.1} % of that of the {} cold ones\n",
            by.warm_requests,
            100.0 * by.ratio,
            by.cold_requests
        )
    });
    told.collect()
}

fn cut(summaries: &[&Summary]) -> String {
    let told = summaries.iter().filter(|summary| summary.cut > 0).map(|summary| {
        let (pace, seconds, all) = (summary.pace, summary.seconds, summary.total());
        format!("{pace}: broken off after {seconds:.1} s with {} of {all} requests under way\n", summary.cut)
    });
    told.collect()
}

fn failures(summaries: &[&Summary]) -> String {
    let mut text = String::new();
    for summary in summaries {
        for (failure, count) in summary.failures.iter().take(FAILURES) {
            text += &format!("{}: {count} of {} failed: {failure}\n", summary.pace, summary.total());
        }
        let more: usize = summary.failures.iter().skip(FAILURES).map(|(_, count)| count).sum();
        if more > 0 {
            text += &format!("{}: {more} failed for other reasons, which --csv has\n", summary.pace);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::bench::ask::Answer;
    use crate::bench::load::Carried;

    #[test]
    fn a_server_elsewhere() {
        let now = Instant::now();
        let good = Answer { tokens: 3, by_model: [("a".to_owned(), 3)].into(), ..Answer::new(now) };
        let failed = (0..5).map(|i| Answer::new(now).failed(format!("no {i}")));
        let carried = Carried { began: now, answers: [good].into_iter().chain(failed).collect() };
        let pace = Pace::Open { rate: 2.5, burstiness: 1.0, most: None };
        let text = tables(&[&Summary::new(pace, &carried, &[], &[], &[])]);
        for part in
            ["2.5/s   6       5", "TTFT", "late", "100.0 %", "1 of 6 failed: no 2", "2 failed for other reasons"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains("busy") && !text.contains("queue"), "{text}");
    }
}
