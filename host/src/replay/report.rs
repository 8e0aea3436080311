//! What a replay came to: for the terminal, as JSON and as CSV. Pure.

use std::io::Write;

use serde_json::{Value, json};
use tokenrouter_plugin_api::{NO_TOKEN, TokenId};

use super::{Difference, Played};

/// Differences that are shown; `--csv` has all.
const SHOWN: usize = 10;
/// Most characters of a candidate's text in the table.
const TEXT_CHARS: usize = 12;
const WIDTH: usize = 100;

/// What every number rests on.
const CAUTION: &str = "\
After its first difference a request would have gone on with other text. The numbers are those of
the recorded text, with the signals that were recorded along it: up to the first difference they
are exact, after it a guess. `tokenrouter eval` measures.
";

pub struct Report<'a> {
    /// Name, version and file.
    pub policy: String,
    /// Where the trace is from.
    pub trace: String,
    /// In the route's order, then others that wrote in the recording.
    pub models: Vec<String>,
    pub played: &'a [Played],
    pub notes: &'a [String],
    /// The text of a token, if a tokenizer is at hand.
    pub text: &'a dyn Fn(TokenId) -> Option<String>,
}

fn share(part: usize, all: usize) -> f64 {
    if all == 0 { 0.0 } else { part as f64 / all as f64 }
}

fn percent(part: usize, all: usize) -> String {
    format!("{part} ({:5.1} %)", 100.0 * share(part, all))
}

fn one_or_more(count: usize, thing: &str) -> String {
    format!("{count} {thing}{}", if count == 1 { "" } else { "s" })
}

impl Report<'_> {
    fn sum(&self, of: impl Fn(&Played) -> usize) -> usize {
        self.played.iter().map(of).sum()
    }

    fn tokens(&self) -> usize {
        self.sum(|played| played.recorded.len())
    }

    fn first(&self) -> impl Iterator<Item = (&Played, &Difference)> {
        self.played.iter().filter_map(|played| Some((played, played.first.as_ref()?)))
    }

    /// For the terminal.
    pub fn table(&self) -> String {
        let (tokens, requests) = (self.tokens(), self.played.len());
        let mut out = format!("policy   {}\ntrace    {}\n", self.policy, self.trace);
        out += &format!("         {}, {}\n\n", one_or_more(requests, "request"), one_or_more(tokens, "token"));
        let mut line = |what: &str, recorded: String, chosen: String| {
            out += &format!("{what:<32}{recorded:>20}{chosen:>20}\n");
        };
        line("", "as recorded".into(), "this policy".into());
        for model in &self.models {
            let by = |of: fn(&Played) -> &Vec<String>| {
                percent(self.sum(|played| of(played).iter().filter(|writer| *writer == model).count()), tokens)
            };
            line(&format!("tokens by {model}"), by(|played| &played.recorded), by(|played| &played.chosen));
        }
        let per_request =
            |of: &dyn Fn(&Played) -> u32| format!("{:.2}", share(self.sum(|played| of(played) as usize), requests));
        let recorded = per_request(&|played| played.recorded_handoffs);
        line("hand-offs a request", recorded, per_request(&|played| played.handoffs));
        line("tokens without a recorded row", String::new(), percent(self.sum(|played| played.unasked), tokens));
        let (alike, compared) = (self.sum(|played| played.alike), self.sum(|played| played.compared));
        let different = self.first().count();
        out += &format!(
            "\ndecisions alike {} of {compared} rows, all of them in {} of {requests} requests\n",
            percent(alike, compared),
            requests - different
        );
        if different > 0 {
            out += &self.differences(different);
        }
        for note in self.notes {
            out += &format!("\n{note}");
        }
        if !self.notes.is_empty() {
            out.push('\n');
        }
        if different > 0 || self.sum(|played| played.unasked) > 0 {
            out += &format!("\n{CAUTION}");
        }
        out
    }

    fn differences(&self, count: usize) -> String {
        let which = if count > SHOWN { format!(", {SHOWN} of {count} requests") } else { String::new() };
        let mut out = format!("\nfirst differences{which}\n");
        let row = |fields: [&str; 7]| {
            let [request, token, model, candidate, recorded, chosen, signals] = fields;
            let line = format!("{request:>8}{token:>7}  {model:<12}{candidate:<20}{recorded:<14}{chosen:<14}{signals}");
            let line: String = line.trim_end().chars().take(WIDTH).collect();
            line + "\n"
        };
        out += &row(["request", "token", "model", "candidate", "recorded", "this policy", "signals"]);
        for (played, first) in self.first().take(SHOWN) {
            let id = if first.candidate == NO_TOKEN { "?".to_owned() } else { format!("#{}", first.candidate) };
            let text = (self.text)(first.candidate).map(|text| {
                let text: String = text.chars().take(TEXT_CHARS).collect();
                format!("{text:?} ")
            });
            let signals: Vec<String> = first.signals.iter().map(|(name, value)| format!("{name} {value:.4}")).collect();
            // What does not fit beside stands below.
            let beside = signals.first().filter(|text| signals.len() == 1 && text.chars().count() <= 23);
            out += &row([
                &played.id.to_string(),
                &first.position.to_string(),
                &first.model,
                &format!("{}{id}", text.unwrap_or_default()),
                &first.recorded,
                &first.chosen,
                beside.map_or("", String::as_str),
            ]);
            if beside.is_none() {
                for pair in signals.chunks(3) {
                    out += &row(["", "", &pair.join("  "), "", "", "", ""]);
                }
            }
        }
        out
    }

    /// For programs.
    pub fn json(&self) -> Value {
        let tokens = self.tokens();
        let by = |of: fn(&Played) -> &Vec<String>| -> Value {
            let count = |model: &String| self.sum(|played| of(played).iter().filter(|writer| *writer == model).count());
            self.models
                .iter()
                .map(|model| (model.clone(), json!(count(model))))
                .collect::<serde_json::Map<_, _>>()
                .into()
        };
        let total = |of: &dyn Fn(&Played) -> u32| self.sum(|played| of(played) as usize);
        json!({
            "policy": self.policy,
            "trace": self.trace,
            "requests": self.played.len(),
            "tokens": tokens,
            "recorded": { "tokens_by_model": by(|p| &p.recorded), "handoffs": total(&|p| p.recorded_handoffs) },
            "chosen": {
                "tokens_by_model": by(|p| &p.chosen),
                "handoffs": total(&|p| p.handoffs),
                "tokens_without_row": self.sum(|p| p.unasked),
            },
            "decisions": { "compared": self.sum(|p| p.compared), "alike": self.sum(|p| p.alike) },
            "exact": self.first().next().is_none() && self.sum(|p| p.unasked) == 0,
            "notes": self.notes,
            "first_differences": self.first().map(|(played, first)| json!({
                "request": played.id,
                "token": first.position,
                "model": first.model,
                "candidate": first.candidate,
                "text": (self.text)(first.candidate),
                "recorded": first.recorded,
                "chosen": first.chosen,
                "signals": first.signals.iter().map(|(name, value)| (name.clone(), json!(value)))
                    .collect::<serde_json::Map<_, _>>(),
            })).collect::<Vec<_>>(),
        })
    }

    /// One line a request.
    pub fn csv(&self, to: impl Write) -> Result<(), csv::Error> {
        let mut out = csv::Writer::from_writer(to);
        let by = |kind: &str| self.models.iter().map(move |model| format!("{kind}_{model}")).collect::<Vec<_>>();
        let fixed = |names: &[&str]| names.iter().map(|name| name.to_string()).collect::<Vec<_>>();
        let head = [
            fixed(&["request", "tokens"]),
            by("recorded"),
            by("chosen"),
            fixed(&["recorded_handoffs", "handoffs", "without_row", "compared", "alike"]),
            fixed(&[
                "first_token",
                "first_model",
                "first_candidate",
                "first_recorded",
                "first_chosen",
                "first_signals",
            ]),
        ];
        out.write_record(head.concat())?;
        for played in self.played {
            let count = |writers: &[String]| {
                let of = |model: &String| writers.iter().filter(|writer| *writer == model).count().to_string();
                self.models.iter().map(of).collect::<Vec<_>>()
            };
            let numbers = [played.recorded_handoffs as usize, played.handoffs as usize];
            let numbers = numbers.into_iter().chain([played.unasked, played.compared, played.alike]);
            let first = played.first.as_ref().map_or_else(
                || vec![String::new(); 6],
                |first| {
                    let signals = first.signals.iter().map(|(name, value)| format!("{name}={value}"));
                    vec![
                        first.position.to_string(),
                        first.model.clone(),
                        first.candidate.to_string(),
                        first.recorded.clone(),
                        first.chosen.clone(),
                        signals.collect::<Vec<_>>().join(" "),
                    ]
                },
            );
            let line = [
                vec![played.id.to_string(), played.recorded.len().to_string()],
                count(&played.recorded),
                count(&played.chosen),
                numbers.map(|number| number.to_string()).collect(),
                first,
            ];
            out.write_record(line.concat())?;
        }
        Ok(out.flush()?)
    }
}
