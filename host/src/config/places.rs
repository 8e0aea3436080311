//! Where the values of a configuration were written.

use std::fmt;

use super::error::Origin;
use super::tree::{Node, Value};

/// A value's place, and those of the values in it.
#[derive(Clone, PartialEq, Eq)]
pub struct Places {
    origin: Origin,
    /// By key as in a JSON pointer, or by index.
    within: Vec<(String, Places)>,
}

/// Settings are the same wherever they are written, and this is part of their digest.
impl fmt::Debug for Places {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("…")
    }
}

impl Places {
    pub(super) fn of(node: &Node) -> Self {
        let within = match &node.value {
            Value::Table(entries) => entries.iter().map(|(key, node)| (escaped(&key.name), Self::of(node))).collect(),
            Value::Array(items) => items.iter().enumerate().map(|(i, node)| (i.to_string(), Self::of(node))).collect(),
            _ => Vec::new(),
        };
        Self { origin: node.origin.clone(), within }
    }

    /// Where that was written of which `told` tells: a JSON pointer, and after it any words that follow on ` = ` or
    /// `: `. Of what is not written it is where the table around it was; `None` where that is the whole file.
    pub fn at(&self, told: &str) -> Option<&Origin> {
        let (mut at, mut told, mut origin) = (self, told, None);
        loop {
            // A key may begin another one.
            let next = at.within.iter().filter_map(|(key, place)| {
                let rest = told.strip_prefix('/')?.strip_prefix(key.as_str())?;
                let ends = rest.is_empty() || [" = ", ": ", "/"].iter().any(|next| rest.starts_with(next));
                ends.then_some((rest, place))
            });
            match next.min_by_key(|(rest, _)| rest.len()) {
                Some((rest, place)) => (at, told, origin) = (place, rest, Some(&place.origin)),
                None => return origin,
            }
        }
    }
}

/// `key` as a part of a JSON pointer.
pub(super) fn escaped(key: &str) -> String {
    key.replace('~', "~0").replace('/', "~1")
}
