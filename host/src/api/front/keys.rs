//! Secrets that clients show, compared without telling by the time it takes how much of one was right.

use std::sync::Arc;

use arc_swap::ArcSwap;
use axum::http::{HeaderMap, header};
use sha2::{Digest, Sha256};
use subtle::{Choice, ConditionallySelectable, ConstantTimeEq};

/// Keys with the names of those who have them.
#[derive(Default)]
pub struct KeyRing(Vec<(Arc<str>, [u8; 32])>);

impl KeyRing {
    /// Pairs of name and key. Only the keys' SHA-256 stays: whatever is compared has one length.
    pub fn new<'a>(keys: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        Self(keys.into_iter().map(|(name, key)| (name.into(), Sha256::digest(key).into())).collect())
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Who has this key.
    pub fn owner(&self, given: &[u8]) -> Option<&Arc<str>> {
        let given: [u8; 32] = Sha256::digest(given).into();
        // All keys are looked at, whatever the first one says.
        let mut found = 0u32;
        let mut known = Choice::from(0);
        for (place, (_, key)) in (0u32..).zip(&self.0) {
            let same = key.ct_eq(&given);
            found.conditional_assign(&place, same);
            known |= same;
        }
        if known.into() { self.0.get(found as usize).map(|(name, _)| name) } else { None }
    }
}

/// The key in `Authorization: Bearer KEY`; nothing for other schemes.
pub fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let value = headers.get(header::AUTHORIZATION)?.as_bytes();
    let (scheme, key) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii())
}

/// The key that a request shows: in `x-api-key`, or as a bearer. With both, the bearer may be an admin key.
pub fn shown(headers: &HeaderMap) -> Option<&[u8]> {
    headers.get("x-api-key").map(|key| key.as_bytes().trim_ascii()).or_else(|| bearer(headers))
}

/// Keys in force, which a reload replaces as a whole.
#[derive(Default)]
pub struct Keys(ArcSwap<KeyRing>);

impl Keys {
    pub fn set(&self, keys: KeyRing) {
        self.0.store(keys.into());
    }

    pub fn current(&self) -> Arc<KeyRing> {
        self.0.load_full()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_owner_of_a_key() {
        let ring = KeyRing::new([("ann", "key-of-ann"), ("bob", "key-of-bob")]);
        assert_eq!(ring.owner(b"key-of-ann").map(|name| &**name), Some("ann"));
        assert_eq!(ring.owner(b"key-of-bob").map(|name| &**name), Some("bob"));
        for wrong in ["", "key-of-an", "key-of-ann ", "KEY-OF-ANN"] {
            assert_eq!(ring.owner(wrong.as_bytes()), None, "{wrong}");
        }
        assert_eq!(KeyRing::default().owner(b""), None);
    }

    #[test]
    fn where_a_key_is_shown() {
        let of = |pairs: &[(&'static str, &'static str)]| {
            let headers: HeaderMap = pairs.iter().map(|(k, v)| (k.parse().unwrap(), v.parse().unwrap())).collect();
            shown(&headers).map(|key| String::from_utf8(key.to_vec()).unwrap())
        };
        assert_eq!(of(&[("authorization", "bEaReR  k1 ")]).as_deref(), Some("k1"));
        assert_eq!(of(&[("x-api-key", "k2")]).as_deref(), Some("k2"));
        assert_eq!(of(&[("authorization", "Basic abc"), ("x-api-key", "k2")]).as_deref(), Some("k2"));
        assert_eq!(of(&[("authorization", "Bearer k1"), ("x-api-key", "k2")]).as_deref(), Some("k2"));
        assert_eq!(of(&[("authorization", "Basic abc")]), None);
        assert_eq!(of(&[]), None);
    }
}
