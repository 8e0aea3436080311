//! Which model of a route plays which role.

use crate::{Context, ModelIndex, PolicyError};

/// Which of two models an instance is attached to, and the other one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// At the small model (role `slm`).
    Small {
        /// The other one.
        large: ModelIndex,
    },
    /// At the large model (role `llm`).
    Large {
        /// The other one.
        small: ModelIndex,
    },
}

impl Context<'_> {
    /// The models of a route that has exactly the given roles, each once. `policy` is the policy's name,
    /// for the error. Names of models do not count, unlike in [`Context::find`].
    pub fn roles<const N: usize>(&self, policy: &str, roles: [&str; N]) -> Result<[ModelIndex; N], PolicyError> {
        let with = |role: &str| {
            let mut with = self.models.iter().enumerate().filter(|(_, m)| m.role == role).map(|(i, _)| i as ModelIndex);
            with.next().filter(|_| with.next().is_none())
        };
        let found = roles.map(with);
        if self.models.len() == N && found.iter().all(Option::is_some) {
            return Ok(found.map(|model| model.unwrap_or_default()));
        }
        let wanted: Vec<_> = roles.iter().map(|role| format!("\"{role}\"")).collect();
        let has: Vec<_> = self.models.iter().map(|m| format!("{} = \"{}\"", m.name, m.role)).collect();
        Err(PolicyError::new(format!(
            "{policy} needs exactly {} models, with the roles {}; route `{}` has roles {{ {} }}",
            match N {
                2 => "two".to_owned(),
                3 => "three".to_owned(),
                n => n.to_string(),
            },
            wanted.join(" and "),
            self.route,
            has.join(", ")
        )))
    }

    /// The side of this instance in a route of a model with role `slm` and one with role `llm`.
    pub fn side(&self, policy: &str) -> Result<Side, PolicyError> {
        let [small, large] = self.roles(policy, ["slm", "llm"])?;
        Ok(if self.model == small { Side::Small { large } } else { Side::Large { small } })
    }

    /// [`Context::side`] in a route whose entry is the small model: for policies in which an answer begins
    /// there. With another entry the large model would write the first token unasked.
    pub fn side_from_small(&self, policy: &str) -> Result<Side, PolicyError> {
        let [small, _] = self.roles(policy, ["slm", "llm"])?;
        self.begins_at(policy, small)?;
        self.side(policy)
    }

    /// The entry of the route is `model`.
    pub fn begins_at(&self, policy: &str, model: ModelIndex) -> Result<(), PolicyError> {
        if self.entry == model {
            return Ok(());
        }
        let name = self.models.get(model as usize).map_or("?", |m| &m.name);
        let route = self.route;
        Err(PolicyError::new(format!("{policy} begins at model `{name}`; set entry = \"{name}\" in route `{route}`")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ModelDescription, NoServices};

    fn with<T>(roles: &[&str], model: ModelIndex, body: impl FnOnce(&Context<'_>) -> T) -> T {
        let models: Vec<_> =
            roles.iter().map(|role| ModelDescription { name: format!("m-{role}"), role: role.to_string() }).collect();
        let (route, services) = ("r", &NoServices);
        body(&Context { route, model, models: &models, entry: 0, vocab_size: 9, eos: &[], services })
    }

    #[test]
    fn each_role_once_in_any_order() {
        with(&["c", "a", "b"], 0, |ctx| assert_eq!(ctx.roles("p", ["a", "b", "c"]), Ok([1, 2, 0])));
        with(&["llm", "slm"], 0, |ctx| assert_eq!(ctx.side("p"), Ok(Side::Large { small: 1 })));
        with(&["llm", "slm"], 1, |ctx| assert_eq!(ctx.side("p"), Ok(Side::Small { large: 0 })));
        let error = with(&["llm", "slm"], 1, |ctx| ctx.side_from_small("p")).unwrap_err();
        assert_eq!(error.message, "p begins at model `m-slm`; set entry = \"m-slm\" in route `r`");
        assert!(with(&["slm", "llm"], 1, |ctx| ctx.side_from_small("p")).is_ok());
        for roles in [&["a"][..], &["a", "a"], &["a", "b", "b"], &["a", "m-b"]] {
            let error = with(roles, 0, |ctx| ctx.roles("p", ["a", "b"])).unwrap_err();
            assert!(
                error.message.starts_with("p needs exactly two models, with the roles \"a\" and \"b\"; route `r` has")
            );
            assert!(error.message.contains("m-a = \"a\""), "{error}");
        }
    }
}
