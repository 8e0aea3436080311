//! Keys of the operator and of clients. No message shows one.

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
        f.write_str("…")
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
    let wrong = || Fault::at(&field.node.origin, format!("{}: {}", field.name, needed()));
    if usable(&key) { Ok(AdminKey(key)) } else { Err(wrong()) }
}

fn usable(key: &str) -> bool {
    (SHORTEST..=LONGEST).contains(&key.len()) && key.bytes().all(|byte| byte.is_ascii_graphic())
}

fn needed() -> String {
    format!(
        "must be a string of {SHORTEST} to {LONGEST} letters, digits and signs without spaces, for example what \
         `openssl rand -hex 32` prints"
    )
}

/// The secret of a client, and what the client is called in logs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiKey {
    pub name: String,
    key: AdminKey,
}

impl ApiKey {
    pub fn expose(&self) -> &str {
        self.key.expose()
    }
}

const NAME: &str = "must be 1 to 64 letters, digits or - _ . and nothing else";

fn is_name(name: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    (1..=64).contains(&name.len()) && name.bytes().all(fits)
}

/// The name of the key at this place, where none is given.
fn numbered(place: usize) -> String {
    format!("key-{}", place + 1)
}

/// `server.api_keys`: a list of keys, each alone or as `{ name, key }`.
pub(super) fn api_keys(section: &mut Section) -> Result<Vec<ApiKey>, Fault> {
    let Some(list) = section.take("api_keys") else { return Ok(Vec::new()) };
    let at_list = |message: String| Fault::at(&list.node.origin, format!("server.api_keys: {message}"));
    let fields = list.array("keys").map_err(|_| at_list("must be an array of strings or of { name, key }".into()))?;
    if fields.is_empty() {
        return Err(list.fault("must have at least one key; leave it out for none"));
    }
    let read = |(place, field): (usize, &Field)| {
        let Ok(mut section) = field.section() else { return Ok(ApiKey { name: numbered(place), key: key(field)? }) };
        let (name, secret) = (section.take("name"), section.take("key"));
        let (Some(name), Some(secret)) = (name, secret) else {
            return Err(Fault::at(&field.node.origin, format!("{}: needs `name` and `key`", field.name)));
        };
        section.end()?;
        let text = name.text()?;
        if is_name(&text) { Ok(ApiKey { name: text, key: key(&secret)? }) } else { Err(name.fault(NAME)) }
    };
    let keys = fields.iter().enumerate().map(read).collect::<Result<Vec<_>, _>>()?;
    distinct(&keys).map_err(at_list)?;
    Ok(keys)
}

/// Names tell clients apart.
pub fn distinct(keys: &[ApiKey]) -> Result<(), String> {
    let mut names: Vec<&str> = keys.iter().map(|key| key.name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(format!("two keys have the name `{}`; give each client its own", pair[0])),
        None => Ok(()),
    }
}

/// The keys in the text of a file: one a line, as `KEY` or `NAME KEY`; `#` begins a comment line. `before`
/// keys come first when they are numbered. No message shows a key.
pub fn key_file(text: &str, before: usize) -> Result<Vec<ApiKey>, String> {
    let mut keys = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        let (name, secret) = match words[..] {
            [] => continue,
            [first, ..] if first.starts_with('#') => continue,
            [secret] => (numbered(before + keys.len()), secret),
            [name, secret] => (name.to_owned(), secret),
            _ => return Err(format!("line {number}: must be `KEY` or `NAME KEY`")),
        };
        if !is_name(&name) {
            return Err(format!("line {number}: the name {NAME}"));
        }
        if !usable(secret) {
            return Err(format!("line {number}: {}", needed()));
        }
        keys.push(ApiKey { name, key: AdminKey(secret.into()) });
    }
    if keys.is_empty() {
        return Err("has no key; write one a line, as `KEY` or `NAME KEY`".into());
    }
    Ok(keys)
}
