//! The configuration as a tree of values that know where they were written. Pure.

use std::collections::BTreeMap;
use std::num::IntErrorKind;
use std::ops::Range;

use toml::de::{DeTable, DeValue};

use super::error::{Fault, Origin};
use crate::plain::short;
use crate::plain::suggestion;

/// A value and where it was written.
#[derive(Clone, Debug)]
pub struct Node {
    pub value: Value,
    pub origin: Origin,
}

#[derive(Clone, Debug)]
pub enum Value {
    Text(String),
    Integer(i64),
    /// An integer beyond 64 bits, as written: no key takes one.
    Large(String),
    Float(f64),
    Bool(bool),
    /// A date or a time: valid TOML that no key takes.
    Date(String),
    Array(Vec<Node>),
    /// In the order of the file.
    Table(Vec<(Key, Node)>),
    /// Text of an environment variable: whatever type the key asks for.
    Raw(String),
}

/// A key and where it was written.
#[derive(Clone, Debug)]
pub struct Key {
    pub name: String,
    pub origin: Origin,
}

/// Parse a TOML document.
pub fn parse(text: &str) -> Result<Node, Fault> {
    let lines = Lines::new(text);
    let table = DeTable::parse(text).map_err(|e| Fault {
        origin: e.span().map(|s| lines.origin(&s)),
        message: match e.span().and_then(|span| text.get(span)).filter(|_| e.message() == "duplicate key") {
            Some(key) => format!("not valid TOML: `{}` is given twice; leave one of them", short(key)),
            None => format!("not valid TOML: {}", e.message().split_whitespace().collect::<Vec<_>>().join(" ")),
        },
    })?;
    let span = table.span();
    Ok(Node { value: table_value(&lines, table.get_ref())?, origin: lines.origin(&span) })
}

/// Byte offsets of the starts of lines.
struct Lines(Vec<usize>);

impl Lines {
    fn new(text: &str) -> Self {
        Self(
            std::iter::once(0)
                .chain(text.bytes().enumerate().filter(|(_, b)| *b == b'\n').map(|(i, _)| i + 1))
                .collect(),
        )
    }
    fn origin(&self, span: &Range<usize>) -> Origin {
        Origin::Line(self.0.partition_point(|start| *start <= span.start))
    }
}

fn table_value(lines: &Lines, table: &DeTable<'_>) -> Result<Value, Fault> {
    let mut entries: Vec<_> = table.iter().collect();
    entries.sort_by_key(|(key, _)| key.span().start);
    let entries = entries.into_iter().map(|(key, value)| {
        let origin = lines.origin(&key.span());
        // A table made by `[a.b]` alone spans nothing of its own: its key is the place.
        let at =
            if matches!(value.get_ref(), DeValue::Table(_)) { origin.clone() } else { lines.origin(&value.span()) };
        let node = Node { value: convert(lines, value.get_ref(), &at)?, origin: at };
        Ok((Key { name: key.get_ref().to_string(), origin }, node))
    });
    Ok(Value::Table(entries.collect::<Result<_, Fault>>()?))
}

fn convert(lines: &Lines, value: &DeValue<'_>, origin: &Origin) -> Result<Value, Fault> {
    Ok(match value {
        DeValue::String(s) => Value::Text(s.to_string()),
        DeValue::Integer(i) => match i64::from_str_radix(i.as_str(), i.radix()) {
            Ok(i) => Value::Integer(i),
            Err(_) => Value::Large(i.to_string()),
        },
        DeValue::Float(x) => match x.as_str().parse() {
            Ok(x) => Value::Float(x),
            Err(_) => return Err(Fault::at(origin, format!("{} is not a number", x.as_str()))),
        },
        DeValue::Boolean(b) => Value::Bool(*b),
        DeValue::Datetime(d) => Value::Date(d.to_string()),
        DeValue::Array(items) => Value::Array(
            items
                .iter()
                .map(|item| {
                    let origin = lines.origin(&item.span());
                    Ok(Node { value: convert(lines, item.get_ref(), &origin)?, origin })
                })
                .collect::<Result<_, Fault>>()?,
        ),
        DeValue::Table(table) => table_value(lines, table)?,
    })
}

impl Node {
    /// Kind of value in words.
    fn kind(&self) -> &'static str {
        match self.value {
            Value::Text(_) => "a string",
            Value::Integer(_) | Value::Large(_) => "an integer",
            Value::Float(_) => "a number",
            Value::Bool(_) => "a boolean",
            Value::Date(_) => "a date",
            Value::Array(_) => "an array",
            Value::Table(_) => "a table",
            Value::Raw(_) => "text",
        }
    }

    /// The value as a person wrote it, shortened.
    fn shown(&self) -> String {
        let text = match &self.value {
            Value::Text(s) => format!("{s:?}"),
            Value::Raw(s) => format!("{s:?}"),
            Value::Integer(i) => i.to_string(),
            Value::Float(x) => x.to_string(),
            Value::Bool(b) => b.to_string(),
            Value::Date(text) | Value::Large(text) => text.clone(),
            Value::Array(items) => format!("[{}]", items.iter().map(Node::shown).collect::<Vec<_>>().join(", ")),
            Value::Table(_) => "{…}".into(),
        };
        short(&text)
    }
}

/// A value with its full name, for reading.
#[derive(Clone, Debug)]
pub struct Field {
    pub name: String,
    pub node: Node,
}

impl Field {
    /// `name = value: message`, at the value's place.
    pub fn fault(&self, message: impl AsRef<str>) -> Fault {
        Fault::at(&self.node.origin, format!("{} = {}: {}", self.name, self.node.shown(), message.as_ref()))
    }

    fn wrong_type(&self, wanted: &str) -> Fault {
        match self.node.value {
            Value::Raw(_) => self.fault(format!("must be {wanted}")),
            _ => self.fault(format!("must be {wanted}, not {}", self.node.kind())),
        }
    }

    pub fn text(&self) -> Result<String, Fault> {
        match &self.node.value {
            Value::Text(s) | Value::Raw(s) if s.is_empty() => Err(self.fault("must not be empty")),
            Value::Text(s) | Value::Raw(s) if s.contains('\0') => Err(self.fault("must not hold a NUL character")),
            Value::Text(s) | Value::Raw(s) => Ok(s.clone()),
            _ => Err(self.wrong_type("a string")),
        }
    }

    /// An integer in `range`.
    pub fn integer(&self, range: std::ops::RangeInclusive<i64>) -> Result<i64, Fault> {
        let value = match &self.node.value {
            Value::Integer(i) => Some(*i),
            Value::Large(_) => None,
            Value::Raw(s) => match s.trim().parse::<i64>() {
                Ok(value) => Some(value),
                Err(e) if matches!(e.kind(), IntErrorKind::PosOverflow | IntErrorKind::NegOverflow) => None,
                Err(_) => return Err(self.wrong_type("an integer")),
            },
            _ => return Err(self.wrong_type("an integer")),
        };
        let (low, high) = (range.start(), range.end());
        value.filter(|value| range.contains(value)).ok_or_else(|| match (value, *high) {
            (Some(_), i64::MAX) => self.fault(format!("must be at least {low}")),
            (_, high) => self.fault(format!("must be from {low} to {high}")),
        })
    }

    /// A number in `range`, integer or not.
    pub fn number(&self, range: std::ops::RangeInclusive<f64>) -> Result<f64, Fault> {
        let value = match &self.node.value {
            Value::Integer(i) => *i as f64,
            // No range comes near.
            Value::Large(_) => f64::NAN,
            Value::Float(x) => *x,
            Value::Raw(s) => s.trim().parse().map_err(|_| self.wrong_type("a number"))?,
            _ => return Err(self.wrong_type("a number")),
        };
        if range.contains(&value) {
            Ok(value)
        } else {
            Err(self.fault(format!("must be from {} to {}", range.start(), range.end())))
        }
    }

    pub fn boolean(&self) -> Result<bool, Fault> {
        match &self.node.value {
            Value::Bool(b) => Ok(*b),
            Value::Raw(s) => s.trim().parse().map_err(|_| self.fault("must be true or false")),
            _ => Err(self.wrong_type("true or false")),
        }
    }

    /// The elements of an array; a single value from the environment may list them with commas.
    pub fn array(&self, of: &str) -> Result<Vec<Field>, Fault> {
        let name = |i: usize| format!("{}[{i}]", self.name);
        match &self.node.value {
            Value::Array(items) => {
                Ok(items.iter().enumerate().map(|(i, node)| Field { name: name(i), node: node.clone() }).collect())
            }
            Value::Raw(s) => Ok(s
                .split(',')
                .enumerate()
                .map(|(i, part)| Field {
                    name: name(i),
                    node: Node { value: Value::Raw(part.trim().into()), origin: self.node.origin.clone() },
                })
                .collect()),
            _ => Err(self.wrong_type(&format!("an array of {of}"))),
        }
    }

    pub fn is_array(&self) -> bool {
        matches!(self.node.value, Value::Array(_)) || matches!(&self.node.value, Value::Raw(s) if s.contains(','))
    }

    /// The entries of a table, for reading by key.
    pub fn section(&self) -> Result<Section, Fault> {
        match &self.node.value {
            Value::Table(entries) => Ok(Section {
                name: self.name.clone(),
                origin: self.node.origin.clone(),
                left: entries.clone(),
                known: Vec::new(),
            }),
            _ => Err(self.wrong_type("a table")),
        }
    }

    /// The value as JSON. JSON has no dates and no NaN or infinity, so those are faults.
    pub fn json(&self) -> Result<serde_json::Value, Fault> {
        use serde_json::Value as Json;
        Ok(match &self.node.value {
            Value::Text(s) => Json::String(s.clone()),
            Value::Integer(i) => Json::from(*i),
            Value::Large(_) => {
                return Err(self.fault(format!("must be from {} to {}, or with a decimal point", i64::MIN, i64::MAX)));
            }
            Value::Float(x) => match serde_json::Number::from_f64(*x) {
                Some(number) => Json::Number(number),
                None => return Err(self.fault("must be a finite number: settings are handed over as JSON")),
            },
            Value::Bool(b) => Json::Bool(*b),
            Value::Date(_) => return Err(self.fault("dates are not supported in settings; write a string")),
            Value::Array(_) => Json::Array(self.array("values")?.iter().map(Field::json).collect::<Result<_, _>>()?),
            Value::Table(_) => {
                let fields = self.section()?.rest();
                let entries = fields.into_iter().map(|(key, field)| Ok((key.name, field.json()?)));
                Json::Object(entries.collect::<Result<_, Fault>>()?)
            }
            // Settings have no types that the host knows: a scalar as JSON has it, else a string.
            Value::Raw(s) => match serde_json::from_str::<Json>(s) {
                Ok(value @ (Json::Bool(_) | Json::Number(_))) => value,
                _ => Json::String(s.clone()),
            },
        })
    }
}

/// A table whose keys are taken one by one; what is left at the end is unknown.
#[derive(Debug)]
pub struct Section {
    pub name: String,
    pub origin: Origin,
    left: Vec<(Key, Node)>,
    known: Vec<&'static str>,
}

impl Section {
    fn child(&self, key: &str) -> String {
        if self.name.is_empty() { key.into() } else { format!("{}.{key}", self.name) }
    }

    /// Take `key`, if it is there.
    pub fn take(&mut self, key: &'static str) -> Option<Field> {
        self.known.push(key);
        let at = self.left.iter().position(|(k, _)| k.name == key)?;
        let (_, node) = self.left.remove(at);
        Some(Field { name: self.child(key), node })
    }

    /// All entries left, in the order of the file.
    pub fn rest(self) -> Vec<(Key, Field)> {
        let name = self.name;
        let full = |key: &str| if name.is_empty() { key.to_string() } else { format!("{name}.{key}") };
        self.left
            .into_iter()
            .map(|(key, node)| {
                let name = full(&key.name);
                (key, Field { name, node })
            })
            .collect()
    }

    /// Every key has been taken, or the first one left is a fault.
    pub fn end(self) -> Result<(), Fault> {
        let Some((key, _)) = self.left.first() else { return Ok(()) };
        let message = format!("unknown key `{}`: {}", self.child(&key.name), suggestion(&key.name, self.known.clone()));
        Err(Fault::at(&key.origin, message))
    }

    /// A fault of the table as a whole.
    pub fn fault(&self, message: impl AsRef<str>) -> Fault {
        Fault::at(&self.origin, format!("[{}]: {}", self.name, message.as_ref()))
    }
}

/// Variables that override keys begin with this; the rest names the key, with `__` between its parts.
pub const ENV_PREFIX: &str = "TOKENROUTER__";

/// Put the values of `TOKENROUTER__…` variables over those of the file.
///
/// Parts match keys of the file whatever their case and with `_` for `-`. A model or a route must be
/// in the file; other keys are added and refused later, by the reader, if nothing knows them.
pub fn override_from_env(root: &mut Node, variables: &BTreeMap<String, String>) -> Result<(), Fault> {
    for (name, text) in variables {
        let Some(path) = name.strip_prefix(ENV_PREFIX) else { continue };
        let origin = Origin::Env(name.clone());
        let parts: Vec<&str> = path.split("__").collect();
        if parts.iter().any(|p| p.is_empty()) {
            return Err(Fault::at(&origin, "must name a key, with `__` between its parts"));
        }
        let mut at = &mut *root;
        for (depth, part) in parts.iter().enumerate() {
            let Value::Table(entries) = &mut at.value else {
                return Err(Fault::at(&origin, format!("`{}` is not a table", parts[..depth].join("."))));
            };
            let same = |key: &str| key.replace('-', "_").eq_ignore_ascii_case(&part.replace('-', "_"));
            let place = match entries.iter().position(|(key, _)| same(&key.name)) {
                Some(place) => place,
                None => {
                    let within = parts[0].to_ascii_lowercase();
                    if depth == 1 && (within == "models" || within == "routes") {
                        let known = suggestion(part, entries.iter().map(|(key, _)| key.name.as_str()));
                        return Err(Fault::at(
                            &origin,
                            format!("[{within}] has no `{}`: {known}", part.to_lowercase()),
                        ));
                    }
                    let key = Key { name: part.to_lowercase(), origin: origin.clone() };
                    entries.push((key, Node { value: Value::Table(Vec::new()), origin: origin.clone() }));
                    entries.len() - 1
                }
            };
            at = &mut entries[place].1;
        }
        if matches!(&at.value, Value::Table(entries) if !entries.is_empty()) {
            return Err(Fault::at(
                &origin,
                format!("`{}` is a table; name one of its keys", parts.join(".").to_lowercase()),
            ));
        }
        *at = Node { value: Value::Raw(text.clone()), origin };
    }
    Ok(())
}
