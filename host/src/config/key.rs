//! `server.admin_key` and `server.admin_keys`. No message shows a key.

use super::error::Fault;
use super::tree::{Field, Section};

const SHORTEST: usize = 16;
const LONGEST: usize = 256;

/// A secret of the operator's.
#[derive(Clone, PartialEq, Eq)]
pub struct AdminKey(String);

impl AdminKey {
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Debug for AdminKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("AdminKey(…)")
    }
}

pub(super) fn admin_keys(section: &mut Section) -> Result<Vec<AdminKey>, Fault> {
    match (section.take("admin_key"), section.take("admin_keys")) {
        (Some(_), Some(list)) => Err(Fault::at(
            &list.node.origin,
            "server.admin_keys: `admin_key` gives the key already; keep one of them, a list for several keys",
        )),
        (Some(one), None) => Ok(vec![key(&one)?]),
        (None, Some(list)) => {
            let wrong = |_| Fault::at(&list.node.origin, "server.admin_keys: must be an array of strings");
            let keys = list.array("strings").map_err(wrong)?;
            if keys.is_empty() {
                return Err(list.fault("must have at least one key; leave it out for none"));
            }
            keys.iter().map(key).collect()
        }
        (None, None) => Ok(Vec::new()),
    }
}

fn key(field: &Field) -> Result<AdminKey, Fault> {
    let key = field.text().unwrap_or_default();
    if (SHORTEST..=LONGEST).contains(&key.len()) && key.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Ok(AdminKey(key));
    }
    let message = format!(
        "{}: must be a string of {SHORTEST} to {LONGEST} letters, digits and signs without spaces, for example what \
         `openssl rand -hex 32` prints",
        field.name
    );
    Err(Fault::at(&field.node.origin, message))
}
