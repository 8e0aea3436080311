//! For policies over a small and a large model.

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
    /// The side of this instance in a route of exactly two models with the roles `slm` and `llm`.
    /// `policy` is the policy's name, for the error.
    pub fn side(&self, policy: &str) -> Result<Side, PolicyError> {
        let only = |role: &str| {
            let mut with = self.models.iter().enumerate().filter(|(_, m)| m.role == role).map(|(i, _)| i as ModelIndex);
            with.next().filter(|_| with.next().is_none())
        };
        match (only("slm"), only("llm"), self.models.len()) {
            (Some(small), Some(large), 2) if self.model == small => Ok(Side::Small { large }),
            (Some(small), Some(_), 2) => Ok(Side::Large { small }),
            _ => {
                let roles: Vec<_> = self.models.iter().map(|m| format!("{} = \"{}\"", m.name, m.role)).collect();
                Err(PolicyError::new(format!(
                    "{policy} needs exactly two models, one with role \"slm\" and one with role \"llm\"; route `{}` has \
                     roles {{ {} }}",
                    self.route,
                    roles.join(", ")
                )))
            }
        }
    }
}
