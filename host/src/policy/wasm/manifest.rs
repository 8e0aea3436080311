//! What a module says of itself: JSON in the custom section `tokenrouter:policy`.

use std::collections::HashSet;

use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value, json};
use tokenrouter_plugin_api::SignalSet;

use super::layout::{MAX_NETS, MAX_SETTINGS};
use crate::plain::plain;

/// Name of the section.
pub const SECTION: &str = "tokenrouter:policy";
/// The ABI that this server provides.
pub const ABI: u64 = 1;
/// Most bytes of the section.
pub const MAX_BYTES: usize = 16 << 10;
/// Most roles that a policy may ask for.
pub const MAX_ROLES: usize = 4;

const MAX_NAME_CHARS: usize = 64;

/// What the section says, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Manifest {
    pub name: String,
    pub version: String,
    /// Roles of the route's models, in the order in which the module counts them. Empty: any models.
    pub roles: Vec<String>,
    /// Role of the model that the route must begin at.
    pub entry: Option<String>,
    pub signals: SignalSet,
    /// Names of router networks, in the order of their columns.
    pub nets: Vec<String>,
    /// In the order in which the module gets them.
    pub settings: Vec<Setting>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Setting {
    pub name: String,
    schema: Value,
    default: Option<f64>,
}

/// Why the section is not understood.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum ManifestError {
    #[error("the section {SECTION} is not JSON of the documented form ({0}); see docs/policies.md")]
    Json(String),
    #[error(
        "the module is for WASM policy ABI {0}, this server provides {ABI}; build it for {ABI}, or take a server that provides {0}"
    )]
    Abi(u64),
    #[error("{field} = {value}: {wanted}")]
    Field { field: String, value: String, wanted: String },
}

#[derive(Deserialize)]
struct Version {
    abi: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    #[serde(rename = "abi")]
    _abi: u64,
    name: String,
    version: String,
    #[serde(default)]
    roles: Vec<String>,
    entry: Option<String>,
    #[serde(default)]
    signals: Vec<String>,
    #[serde(default)]
    nets: Vec<String>,
    #[serde(default)]
    settings: Ordered,
}

/// An object in its order, in which each key stands once.
#[derive(Default)]
struct Ordered(Vec<(String, Value)>);

impl<'de> Deserialize<'de> for Ordered {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Ordered;
            fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                formatter.write_str("an object of settings")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Ordered, A::Error> {
                let mut entries: Vec<(String, Value)> = Vec::new();
                while let Some((name, schema)) = map.next_entry::<String, Value>()? {
                    if entries.iter().any(|(known, _)| *known == name) {
                        return Err(A::Error::custom(format!("duplicate setting `{name}`")));
                    }
                    entries.push((name, schema));
                }
                Ok(Ordered(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    Number,
    Integer,
    Boolean,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenSetting {
    #[serde(rename = "type")]
    kind: Kind,
    #[serde(rename = "description")]
    _description: Option<String>,
    minimum: Option<f64>,
    maximum: Option<f64>,
    default: Option<Value>,
}

/// Names of the scalar signals, as in `RouteBatch::signals`, in the order of their columns.
pub const SIGNALS: [(&str, SignalSet); 6] = [
    ("entropy", SignalSet::ENTROPY),
    ("entropy_norm", SignalSet::ENTROPY_NORM),
    ("top1_prob", SignalSet::TOP1_PROB),
    ("margin", SignalSet::MARGIN),
    ("logsumexp", SignalSet::LOGSUMEXP),
    ("candidate_prob", SignalSet::CANDIDATE_PROB),
];

/// Values are quoted as the JSON that the author wrote, with nothing in it that steers a terminal.
fn fault(field: impl Into<String>, value: &Value, wanted: impl Into<String>) -> ManifestError {
    let shown = |c: char| match c {
        '"' | '\'' | '\\' => c.to_string(),
        c => c.escape_debug().to_string(),
    };
    let value = value.to_string().chars().take(2 * MAX_NAME_CHARS).map(shown).collect();
    ManifestError::Field { field: field.into(), value, wanted: wanted.into() }
}

/// A word that is safe in logs and tables.
fn word(field: &str, text: &str) -> Result<(), ManifestError> {
    let fits = (1..=MAX_NAME_CHARS).contains(&text.len());
    if fits && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.+".contains(&b)) {
        return Ok(());
    }
    Err(fault(field, &json!(text), "give 1 to 64 letters, digits, `-`, `_`, `.` and `+`"))
}

impl Manifest {
    pub fn parse(section: &[u8]) -> Result<Self, ManifestError> {
        let json = |e: serde_json::Error| ManifestError::Json(plain(&e.to_string()).chars().take(200).collect());
        if section.len() > MAX_BYTES {
            return Err(fault("its length", &json!(section.len()), "use at most 16384 bytes"));
        }
        // Another version may have other fields: its number comes first.
        match serde_json::from_slice::<Version>(section).map_err(json)?.abi {
            ABI => {}
            other => return Err(ManifestError::Abi(other)),
        }
        let written: Written = serde_json::from_slice(section).map_err(json)?;
        word("name", &written.name)?;
        word("version", &written.version)?;
        if written.roles.len() > MAX_ROLES {
            return Err(fault("roles", &json!(written.roles), "ask for at most 4"));
        }
        let mut seen = HashSet::new();
        for role in &written.roles {
            word("roles", role)?;
            if !seen.insert(role) {
                return Err(fault("roles", &json!(role), "name each role once"));
            }
        }
        if let Some(entry) = &written.entry
            && !seen.contains(entry)
        {
            return Err(fault("entry", &json!(entry), "give one of `roles`"));
        }
        let mut signals = SignalSet::NONE;
        for name in &written.signals {
            let known = SIGNALS.iter().find(|(known, _)| known == name);
            let wanted = "the signals are entropy, entropy_norm, top1_prob, margin, logsumexp and candidate_prob";
            signals = signals | known.ok_or_else(|| fault("signals", &json!(name), wanted))?.1;
        }
        if written.nets.len() > MAX_NETS {
            return Err(fault("nets", &json!(written.nets), "ask for at most 4"));
        }
        for (at, net) in written.nets.iter().enumerate() {
            word("nets", net)?;
            if written.nets[..at].contains(net) {
                return Err(fault("nets", &json!(net), "name each net once"));
            }
        }
        if written.settings.0.len() > MAX_SETTINGS {
            return Err(fault("settings", &json!(written.settings.0.len()), "use at most 32"));
        }
        let settings = written.settings.0.into_iter().map(|(name, schema)| Setting::new(name, schema));
        Ok(Self {
            name: written.name,
            version: written.version,
            roles: written.roles,
            entry: written.entry,
            signals,
            nets: written.nets,
            settings: settings.collect::<Result<_, _>>()?,
        })
    }

    /// JSON Schema of the settings table.
    pub fn settings_schema(&self) -> String {
        let properties: Map<_, _> = self.settings.iter().map(|s| (s.name.clone(), s.schema.clone())).collect();
        let required: Vec<&str> =
            self.settings.iter().filter(|s| s.default.is_none()).map(|s| s.name.as_str()).collect();
        json!({ "type": "object", "additionalProperties": false, "properties": properties, "required": required })
            .to_string()
    }

    /// The numbers that the module gets for a settings table that has passed the schema.
    pub fn numbers(&self, settings: &str) -> Result<Vec<f64>, String> {
        let table: Map<String, Value> =
            serde_json::from_str(settings).map_err(|e| format!("settings are not a JSON object: {e}"))?;
        let number = |setting: &Setting| {
            let given = table.get(&setting.name).map(|value| number(value).ok_or(value));
            match given {
                Some(Ok(number)) => Ok(number),
                Some(Err(value)) => {
                    Err(format!("settings/{} = {}: give a finite number", setting.name, plain(&value.to_string())))
                }
                None => setting.default.ok_or_else(|| format!("settings/{}: required but missing", setting.name)),
            }
        };
        self.settings.iter().map(number).collect()
    }
}

fn number(value: &Value) -> Option<f64> {
    match value {
        Value::Bool(value) => Some(f64::from(u8::from(*value))),
        value => value.as_f64().filter(|number| number.is_finite()),
    }
}

impl Setting {
    /// Only keywords that are known pass on to the schema's validator: the module's author is not trusted.
    fn new(name: String, schema: Value) -> Result<Self, ManifestError> {
        word("settings", &name)?;
        let place = format!("settings/{name}");
        let form =
            "give `type` (number, integer or boolean), and `minimum`, `maximum`, `default` and `description` as needed";
        let written: WrittenSetting = serde_json::from_value(schema.clone())
            .map_err(|e| fault(&place, &schema, format!("{}; {form}", plain(&e.to_string()))))?;
        if matches!(written.kind, Kind::Boolean) && (written.minimum.is_some() || written.maximum.is_some()) {
            return Err(fault(place, &schema, "a boolean has no `minimum` and no `maximum`"));
        }
        if written.minimum.zip(written.maximum).is_some_and(|(least, most)| least > most) {
            return Err(fault(place, &schema, "no number is between this `minimum` and this `maximum`"));
        }
        let default = written.default.as_ref().map(|value| {
            let right = match written.kind {
                Kind::Number => value.is_number(),
                Kind::Integer => value.as_f64().is_some_and(|number| number.fract() == 0.0),
                Kind::Boolean => value.is_boolean(),
            };
            let in_range = |number: &f64| {
                written.minimum.is_none_or(|least| *number >= least)
                    && written.maximum.is_none_or(|most| *number <= most)
            };
            let number = number(value).filter(|number| right && in_range(number));
            number
                .ok_or_else(|| fault(format!("{place}/default"), value, "give a value that the setting itself allows"))
        });
        Ok(Self { name, schema, default: default.transpose()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(fields: &str) -> Result<Manifest, String> {
        let text = format!(r#"{{"abi": 1, "name": "p", "version": "1.0"{fields}}}"#);
        Manifest::parse(text.as_bytes()).map_err(|e| e.to_string())
    }

    #[test]
    fn everything_that_can_be_said() {
        let manifest = parse(
            r#", "roles": ["slm", "llm"], "entry": "slm", "signals": ["margin", "entropy"], "settings": {
                "z": {"type": "number", "minimum": 0, "maximum": 1, "default": 0.25, "description": "a threshold"},
                "a": {"type": "integer", "minimum": 1},
                "on": {"type": "boolean", "default": true}}"#,
        )
        .unwrap();
        assert_eq!(manifest.signals, SignalSet::ENTROPY | SignalSet::MARGIN);
        assert_eq!(manifest.entry.as_deref(), Some("slm"));
        // In the order of the section, not of the alphabet.
        assert_eq!(manifest.numbers(r#"{"a": 3}"#), Ok(vec![0.25, 3.0, 1.0]));
        assert_eq!(manifest.numbers(r#"{"on": false, "a": 3, "z": 0.1}"#), Ok(vec![0.1, 3.0, 0.0]));
        assert_eq!(manifest.numbers("{}").unwrap_err(), "settings/a: required but missing");
        let check = |settings: Value| crate::policy::validate_settings(&manifest.settings_schema(), &settings);
        assert_eq!(check(json!({"a": 1})), Ok(()));
        assert_eq!(check(json!({})).unwrap_err(), "settings/a: required but missing");
        assert!(check(json!({"a": 1, "z": 2})).unwrap_err().starts_with("settings/z = 2: "));
        assert!(check(json!({"a": 1, "y": 2})).unwrap_err().contains("settings/y = 2: no such setting"));
    }

    #[test]
    fn little_is_enough() {
        let manifest = parse("").unwrap();
        assert_eq!((manifest.signals, manifest.numbers("{}")), (SignalSet::NONE, Ok(vec![])));
    }

    #[test]
    fn what_is_refused() {
        let long = "x".repeat(65);
        for (fields, error) in [
            (r#", "nmae": 1"#.to_owned(), "unknown field `nmae`"),
            (r#", "\u001b[2J": 1"#.to_owned(), r"unknown field `\u{1b}[2J`"),
            (r#", "name": "q""#.to_owned(), "duplicate field `name`"),
            (r#", "roles": ["a", "a"]"#.to_owned(), "roles = \"a\": name each role once"),
            (r#", "roles": ["a", "b", "c", "d", "e"]"#.to_owned(), "ask for at most 4"),
            (format!(r#", "roles": ["{long}"]"#), "give 1 to 64 letters"),
            (r#", "entry": "slm""#.to_owned(), "entry = \"slm\": give one of `roles`"),
            (r#", "signals": ["text"]"#.to_owned(), "signals = \"text\": the signals are entropy, "),
            (r#", "nets": ["n", "n"]"#.to_owned(), "nets = \"n\": name each net once"),
            (r#", "nets": ["a", "b", "c", "d", "e"]"#.to_owned(), "ask for at most 4"),
            (r#", "settings": {"a b": {"type": "number"}}"#.to_owned(), "settings = \"a b\": give 1 to 64"),
            (r#", "settings": {"a": {"type": "string"}}"#.to_owned(), "settings/a = "),
            (r#", "settings": {"a": {"type": "number", "$ref": "http://x"}}"#.to_owned(), "unknown field `$ref`"),
            (r#", "settings": {"a": {"type": "number", "r\u007fm": 1}}"#.to_owned(), r"unknown field `r\u{7f}m`"),
            (r#", "settings": {"a": {"type": "number", "pattern": "(a+)+"}}"#.to_owned(), "unknown field `pattern`"),
            (
                r#", "settings": {"a": {"type": "boolean", "minimum": 1}}"#.to_owned(),
                r#"settings/a = {"type":"boolean","minimum":1}: a boolean has no `minimum`"#,
            ),
            (r#", "roles": ["a\u202e\u0007"]"#.to_owned(), r#"roles = "a\u{202e}\u0007": give 1 to 64 letters"#),
            (
                r#", "settings": {"a": {"type": "number", "minimum": 1, "maximum": 0}}"#.to_owned(),
                "no number is between",
            ),
            (
                r#", "settings": {"a": {"type": "number"}, "a": {"type": "integer"}}"#.to_owned(),
                "duplicate setting `a`",
            ),
            (
                r#", "settings": {"a": {"type": "number", "maximum": 1, "default": 2}}"#.to_owned(),
                "settings/a/default = ",
            ),
            (r#", "settings": {"a": {"type": "integer", "default": 0.5}}"#.to_owned(), "settings/a/default = "),
            (r#", "settings": {"a": {"type": "number", "default": true}}"#.to_owned(), "settings/a/default = "),
        ] {
            let refused = parse(&fields).unwrap_err();
            assert!(refused.contains(error), "{fields}: {refused}");
            assert!(!refused.contains('\n') && refused.len() < 500, "{refused}");
        }
        let refused = |text: &str| Manifest::parse(text.as_bytes()).unwrap_err().to_string();
        assert_eq!(
            refused(r#"{"abi": 2, "anything": []}"#),
            "the module is for WASM policy ABI 2, this server provides 1; build it for 1, or take a server that provides 2"
        );
        assert!(refused("").contains("is not JSON of the documented form"));
        assert!(refused(&"[".repeat(9000)).contains("is not JSON of the documented form"));
        assert!(refused(&" ".repeat(MAX_BYTES + 1)).contains("use at most 16384 bytes"));
        assert!(refused(r#"{"abi": 1, "name": "a\nb", "version": "1"}"#).contains(r#"name = "a\nb": give 1 to 64"#));
    }
}
