//! Probabilities of the models of a route, given by name.

use std::collections::BTreeMap;

use crate::{Context, ModelIndex, PolicyError};

/// How far a sum of weights may be from 1.
const TOLERANCE: f64 = 1e-6;

/// A probability for each model of a route. A draw from [0, 1) picks one.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelWeights {
    /// Sums of the weights up to and with each model, in the route's order.
    bounds: Vec<f64>,
    /// The last model with a weight above 0.
    last: ModelIndex,
}

impl ModelWeights {
    /// `weights` has one for every model of the route and sums to 1. `setting` is the name of the setting,
    /// for errors: a model that the route does not have, one without a weight, a weight below 0, another
    /// sum (to 1e-6).
    pub fn of_all(ctx: &Context<'_>, setting: &str, weights: &BTreeMap<String, f64>) -> Result<Self, PolicyError> {
        let sum = checked_sum(ctx, setting, weights)?;
        if let Some(model) = ctx.models.iter().find(|m| !weights.contains_key(&m.name)) {
            return Err(PolicyError::new(format!(
                "{setting} has none for model `{}`; give each model of the route one",
                model.name
            )));
        }
        if (sum - 1.0).abs() > TOLERANCE {
            return Err(PolicyError::new(format!("{setting} sum to {sum}; they are probabilities and must sum to 1")));
        }
        Ok(Self::new(ctx.models.iter().map(|m| weights.get(&m.name).copied().unwrap_or_default())))
    }

    /// `weights` has one for some models of the route, at least for one and not for `rest`, which gets what
    /// they lack to 1. Errors as in [`Self::of_all`].
    pub fn with_rest(
        ctx: &Context<'_>,
        setting: &str,
        weights: &BTreeMap<String, f64>,
        rest: ModelIndex,
    ) -> Result<Self, PolicyError> {
        let sum = checked_sum(ctx, setting, weights)?;
        if weights.is_empty() {
            return Err(PolicyError::new(format!("{setting} is empty; name at least one model and its probability")));
        }
        let rest = rest as usize;
        if let Some(model) = ctx.models.get(rest).filter(|m| weights.contains_key(&m.name)) {
            return Err(PolicyError::new(format!(
                "{setting} names `{}`, which gets what the others leave; name only the others",
                model.name
            )));
        }
        if sum > 1.0 + TOLERANCE {
            return Err(PolicyError::new(format!("{setting} sum to {sum}; they must sum to at most 1")));
        }
        let weight = |(i, name): (usize, &String)| match weights.get(name) {
            _ if i == rest => (1.0 - sum).max(0.0),
            weight => weight.copied().unwrap_or_default(),
        };
        Ok(Self::new(ctx.models.iter().map(|m| &m.name).enumerate().map(weight)))
    }

    fn new(weights: impl Iterator<Item = f64>) -> Self {
        let (mut bounds, mut last, mut sum) = (Vec::new(), 0, 0.0);
        for (model, weight) in weights.enumerate() {
            sum += weight;
            bounds.push(sum);
            if weight > 0.0 {
                last = model as ModelIndex;
            }
        }
        Self { bounds, last }
    }

    /// The model whose share of [0, 1) holds `draw`. The shares are half-open and lie in the route's order.
    pub fn pick(&self, draw: f64) -> ModelIndex {
        // Rounding may leave the last bound a little below 1.
        self.bounds.iter().position(|&bound| draw < bound).map_or(self.last, |model| model as ModelIndex)
    }
}

fn checked_sum(ctx: &Context<'_>, setting: &str, weights: &BTreeMap<String, f64>) -> Result<f64, PolicyError> {
    if let Some(unknown) = weights.keys().find(|&name| ctx.models.iter().all(|m| m.name != *name)) {
        let names: Vec<_> = ctx.models.iter().map(|m| m.name.as_str()).collect();
        return Err(PolicyError::new(format!(
            "{setting} names `{unknown}`, which route `{}` does not have; its models are {}",
            ctx.route,
            names.join(", ")
        )));
    }
    if let Some((name, weight)) = weights.iter().find(|(_, weight)| !(**weight >= 0.0 && weight.is_finite())) {
        return Err(PolicyError::new(format!("{setting}.{name} is {weight}; set a number of at least 0")));
    }
    // In the route's order, as the bounds are.
    Ok(ctx.models.iter().filter_map(|m| weights.get(&m.name)).sum())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ModelDescription, NoServices};

    fn with<T>(test: impl FnOnce(&Context<'_>) -> T) -> T {
        let models = ["small", "medium", "large"]
            .map(|name| ModelDescription { name: name.to_owned(), role: format!("role of {name}") });
        test(&Context {
            route: "r",
            model: 0,
            models: &models,
            entry: 0,
            vocab_size: 10,
            eos: &[],
            services: &NoServices,
        })
    }

    fn named(weights: &[(&str, f64)]) -> BTreeMap<String, f64> {
        weights.iter().map(|&(name, weight)| (name.to_owned(), weight)).collect()
    }

    fn all(weights: &[(&str, f64)]) -> Result<ModelWeights, String> {
        with(|ctx| ModelWeights::of_all(ctx, "weights", &named(weights))).map_err(|e| e.message)
    }

    fn rest(weights: &[(&str, f64)], rest: ModelIndex) -> Result<ModelWeights, String> {
        with(|ctx| ModelWeights::with_rest(ctx, "shares", &named(weights), rest)).map_err(|e| e.message)
    }

    fn picks(weights: &ModelWeights, draws: &[f64]) -> Vec<ModelIndex> {
        draws.iter().map(|&draw| weights.pick(draw)).collect()
    }

    #[test]
    fn shares_are_half_open_in_the_routes_order() {
        let weights = all(&[("large", 0.2), ("medium", 0.3), ("small", 0.5)]).unwrap();
        assert_eq!(picks(&weights, &[0.0, 0.4999, 0.5, 0.7999, 0.8, 0.999_999]), [0, 0, 1, 1, 2, 2]);
    }

    #[test]
    fn a_weight_of_0_is_never_picked() {
        let weights = all(&[("small", 0.0), ("medium", 0.999_999_5), ("large", 0.0)]).unwrap();
        assert_eq!(picks(&weights, &[0.0, 0.5, 0.999_999_9]), [1, 1, 1]);
        let weights = all(&[("small", 0.5), ("medium", 0.0), ("large", 0.5)]).unwrap();
        assert_eq!(picks(&weights, &[0.4999, 0.5]), [0, 2]);
    }

    #[test]
    fn the_rest_goes_to_one_model() {
        let weights = rest(&[("small", 0.25), ("large", 0.25)], 1).unwrap();
        assert_eq!(picks(&weights, &[0.0, 0.2499, 0.25, 0.7499, 0.75]), [0, 0, 1, 1, 2]);
        let weights = rest(&[("large", 0.25)], 0).unwrap();
        assert_eq!(picks(&weights, &[0.0, 0.7499, 0.75]), [0, 0, 2]);
        let weights = rest(&[("medium", 1.0)], 2).unwrap();
        assert_eq!(picks(&weights, &[0.0, 0.999_999_999]), [1, 1]);
    }

    #[test]
    fn refuses_wrong_weights() {
        for (weights, message) in [
            (
                &[("small", 0.5), ("medium", 0.3), ("large", 0.3)][..],
                "weights sum to 1.1; they are probabilities and must sum to 1",
            ),
            (
                &[("small", 0.0), ("medium", 0.0), ("large", 0.0)],
                "weights sum to 0; they are probabilities and must sum to 1",
            ),
            (
                &[("small", 0.5), ("medium", 0.5)],
                "weights has none for model `large`; give each model of the route one",
            ),
            (
                &[("small", 0.5), ("tiny", 0.5)],
                "weights names `tiny`, which route `r` does not have; its models are small, medium, large",
            ),
            (&[("small", 1.2), ("medium", -0.4), ("large", 0.2)], "weights.medium is -0.4; set a number of at least 0"),
            (&[("small", f64::NAN)], "weights.small is NaN; set a number of at least 0"),
            (&[("small", f64::INFINITY)], "weights.small is inf; set a number of at least 0"),
        ] {
            assert_eq!(all(weights).unwrap_err(), message);
        }
        for (weights, message) in [
            (&[][..], "shares is empty; name at least one model and its probability"),
            (&[("small", 0.1)], "shares names `small`, which gets what the others leave; name only the others"),
            (&[("medium", 0.75), ("large", 0.5)], "shares sum to 1.25; they must sum to at most 1"),
            (&[("large", -0.5)], "shares.large is -0.5; set a number of at least 0"),
        ] {
            assert_eq!(rest(weights, 0).unwrap_err(), message);
        }
    }

    #[test]
    fn rounding_is_no_error() {
        let third = 1.0 / 3.0;
        assert!(all(&[("small", third), ("medium", third), ("large", third)]).is_ok());
        assert!(all(&[("small", 0.333_333_3), ("medium", 0.333_333_3), ("large", 0.333_333_4)]).is_ok());
        let weights = rest(&[("medium", 0.5), ("large", 0.500_000_5)], 0).unwrap();
        assert_eq!(picks(&weights, &[0.0, 0.5]), [1, 2]);
    }
}
