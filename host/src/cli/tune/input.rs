//! From what the user gives to a system. Pure.

use std::collections::BTreeMap;
use std::str::FromStr;

use serde::Deserialize;
use tokenrouter_batching::{Fault, Model, System};

use crate::plain::suggestion;

/// Most requests under way.
const MOST: usize = 4096;

/// Milliseconds of a step, by batch size from 1.
#[derive(Clone, Debug, PartialEq)]
pub struct Times(pub Vec<f64>);

impl FromStr for Times {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let times: Result<Vec<f64>, _> = text.split('/').map(|time| time.trim().parse()).collect();
        times.map(Self).map_err(|_| "must be milliseconds, for example 27.9 or 27.9/28.4/28.9".into())
    }
}

/// A hold in milliseconds, or `auto`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hold(pub Option<f64>);

impl FromStr for Hold {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self(None)),
            text => text.parse().map(|ms| Self(Some(ms))).map_err(|_| "must be milliseconds, or auto".into()),
        }
    }
}

/// Numbers of requests under way, ascending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Concurrency(pub Vec<usize>);

impl FromStr for Concurrency {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| {
            let number = text.trim().parse().ok().filter(|n| (1..=MOST).contains(n));
            number.ok_or_else(|| format!("{text:?}: must be from 1 to {MOST} requests, or a range such as 1..16"))
        };
        let mut all = Vec::new();
        for part in text.split(',') {
            match part.split_once("..") {
                None => all.push(number(part)?),
                Some((from, to)) => {
                    let (from, to) = (number(from)?, number(to.trim_start_matches('='))?);
                    if from > to {
                        return Err(format!("{part:?} is empty; write the smaller number first"));
                    }
                    all.extend(from..=to);
                }
            }
        }
        all.sort_unstable();
        all.dedup();
        Ok(Self(all))
    }
}

/// Where the steps of a model lead.
#[derive(Clone, Debug, PartialEq)]
pub struct Route {
    pub from: String,
    /// Name, probability, and tokens that the step writes then.
    pub to: Vec<(String, f64, f64)>,
}

impl FromStr for Route {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let fault =
            || "must be FROM:TO=P,… where P may be followed by *TOKENS, for example small:small=0.65,large=0.35*0";
        let (from, all) = text.split_once(':').ok_or_else(fault)?;
        let one = |part: &str| {
            let (name, numbers) = part.split_once('=')?;
            let (p, tokens) = numbers.split_once('*').unwrap_or((numbers, "1"));
            Some((name.trim().to_string(), p.trim().parse().ok()?, tokens.trim().parse().ok()?))
        };
        let to = all.split(',').map(|part| one(part).ok_or_else(fault)).collect::<Result<_, _>>()?;
        Ok(Self { from: from.trim().into(), to })
    }
}

/// A description of models in TOML.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Description {
    models: Vec<Described>,
    #[serde(default)]
    sigma: Vec<f64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Described {
    name: String,
    step_ms: Steps,
    #[serde(default)]
    routes: BTreeMap<String, f64>,
    #[serde(default)]
    tokens: BTreeMap<String, f64>,
    #[serde(default = "one")]
    stretch: f64,
    max_batch: Option<usize>,
}

fn one() -> f64 {
    1.0
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Steps {
    One(f64),
    Many(Vec<f64>),
}

/// The system that a TOML text describes. Errors are one line, without the file's name.
pub fn described(text: &str) -> Result<System, String> {
    let description: Description = toml::from_str(text).map_err(|e| {
        let line = e.span().map_or(0, |span| text[..span.start].matches('\n').count()) + 1;
        format!("line {line}: {}", e.message())
    })?;
    let routes = description.models.iter().map(|model| {
        let tokens = |to: &String| model.tokens.get(to).copied().unwrap_or(1.0);
        Route {
            from: model.name.clone(),
            to: model.routes.iter().map(|(to, p)| (to.clone(), *p, tokens(to))).collect(),
        }
    });
    let routes: Vec<Route> = routes.collect();
    for model in &description.models {
        if let Some(name) = model.tokens.keys().find(|to| !model.routes.contains_key(*to)) {
            return Err(format!("tokens of {}: {name} is not one of its routes", model.name));
        }
    }
    let models: Vec<Model> = description
        .models
        .into_iter()
        .map(|model| Model {
            max_batch: model.max_batch,
            stretch: model.stretch,
            ..Model::new(
                model.name,
                match model.step_ms {
                    Steps::One(time) => vec![time],
                    Steps::Many(times) => times,
                },
            )
        })
        .collect();
    let sigma = description.sigma;
    Ok(System { sigma, ..routed(models, &routes)? })
}

/// `models`, the first of which gets new requests, with `routes`. Not checked yet.
pub fn routed(models: Vec<Model>, routes: &[Route]) -> Result<System, String> {
    let names: Vec<&str> = models.iter().map(|model| model.name.as_str()).collect();
    if let Some(name) = names.iter().enumerate().find_map(|(i, name)| names[..i].contains(name).then_some(name)) {
        return Err(format!("models: {name} is there twice; give each its own name"));
    }
    let index = |name: &str| {
        let found = names.iter().position(|known| *known == name);
        found.ok_or_else(|| format!("route: no model is called {name:?}; {}", suggestion(name, names.iter().copied())))
    };
    let (mut routing, mut commits) = (vec![Vec::new(); models.len()], vec![vec![0.0; models.len()]; models.len()]);
    for route in routes {
        let from = index(&route.from)?;
        if !routing[from].is_empty() {
            return Err(format!("route: {} is there twice; write all that follows it in one", route.from));
        }
        routing[from] = vec![0.0; models.len()];
        for (name, p, tokens) in &route.to {
            let to = index(name)?;
            if routing[from][to] != 0.0 {
                return Err(format!("route {}: {name} is there twice", route.from));
            }
            (routing[from][to], commits[from][to]) = (*p, *tokens);
        }
    }
    if let Some(model) = routing.iter().position(Vec::is_empty) {
        let name = names[model];
        return Err(format!("route: none from {name}; say where its steps lead, for example {name}:{}=1", names[0]));
    }
    Ok(System { models, routing, commits, sigma: Vec::new(), entry: 0 })
}

/// Two models, of which the second writes single tokens in place of the first one's.
pub fn replacing(models: Vec<Model>, share: f64) -> Result<System, Fault> {
    if models.len() != 2 {
        return Err(Fault::Count { field: "times (with --handoff)", given: models.len(), wanted: 2 });
    }
    let routing = vec![vec![1.0 - share, share], vec![1.0, 0.0]];
    Ok(System { models, routing, commits: vec![vec![1.0, 0.0]; 2], sigma: Vec::new(), entry: 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn models(names: &[&str]) -> Vec<Model> {
        names.iter().map(|name| Model::new(*name, vec![1.0])).collect()
    }

    #[test]
    fn concurrencies() {
        assert_eq!("8".parse(), Ok(Concurrency(vec![8])));
        assert_eq!("1..3,16,2".parse(), Ok(Concurrency(vec![1, 2, 3, 16])));
        assert_eq!("1..=2".parse(), Ok(Concurrency(vec![1, 2])));
        for text in ["", "0", "4097", "-1", "x", "1..", "1...3"] {
            assert!(text.parse::<Concurrency>().is_err(), "{text}");
        }
    }

    #[test]
    fn routes_in_options() {
        let all = ["a:a=0.65,b=0.35*0", "b:a=1"].map(|text| text.parse().unwrap());
        let system = routed(models(&["a", "b"]), &all).unwrap();
        assert_eq!(system, replacing(models(&["a", "b"]), 0.35).unwrap());
    }

    #[test]
    fn a_description() {
        let text = "sigma = [1, 1, 1.3]\n[[models]]\nname = 'a'\nstep_ms = 6\nroutes = { a = 0.65, b = 0.35 }\n\
                    tokens = { b = 0 }\nstretch = 2.0\n[[models]]\nname = 'b'\nstep_ms = [27.9, 28]\nmax_batch = 3\n\
                    routes = { a = 1 }\n";
        let system = described(text).unwrap();
        let expected = replacing(models(&["a", "b"]), 0.35).unwrap();
        assert_eq!((&system.routing, &system.commits), (&expected.routing, &expected.commits));
        assert_eq!((system.models[0].stretch, system.models[1].max_batch, system.sigma.len()), (2.0, Some(3), 3));
        assert_eq!(system.models[1].step_ms, [27.9, 28.0]);
        for (text, message) in [
            ("[[models]]\nname = 'a'\nstep = 6", "line 3: unknown field `step`"),
            (
                "[[models]]\nname = 'a'\nstep_ms = 6\nroutes = { a = 1 }\ntokens = { b = 0 }",
                "b is not one of its routes",
            ),
            ("[[models]]\nname = 'a'\nstep_ms = 6\nroutes = { b = 1 }", "no model is called \"b\""),
        ] {
            let error = described(text).unwrap_err();
            assert!(error.contains(message), "{error}");
        }
    }

    #[test]
    fn impossible_routes() {
        for (routes, message) in [
            (&["a:a=1"][..], "none from b"),
            (&["a:b=1", "b:a=1", "a:a=1"], "a is there twice"),
            (&["a:a=0.5,a=0.5", "b:a=1"], "a is there twice"),
            (&["a:c=1", "b:a=1"], "no model is called \"c\""),
        ] {
            let routes: Vec<Route> = routes.iter().map(|route| route.parse().unwrap()).collect();
            let error = routed(models(&["a", "b"]), &routes).unwrap_err();
            assert!(error.contains(message), "{error}");
        }
        assert!(routed(models(&["a", "a"]), &[]).unwrap_err().contains("a is there twice"));
        assert!(replacing(models(&["a"]), 0.3).is_err());
    }
}
