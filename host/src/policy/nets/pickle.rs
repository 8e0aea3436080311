//! Reading the pickles of PyTorch checkpoints as data. Nothing is executed: a call stays a record of
//! its name and arguments.
//!
//! Covers what `torch.save` writes for dictionaries of tensors, numbers, texts and lists (protocols 2
//! to 5). Everything else is an error that names the operation and where it is.

use std::collections::HashMap;

/// Most values of one pickle; a checkpoint has some ten for each tensor.
const MOST_VALUES: usize = 1 << 20;

/// Most bytes of the name of a global, of its module and of its own.
const LONGEST_NAME: usize = 256;

/// Where a value is among [`Pickle::values`].
pub type Ref = usize;

/// A value. Containers hold references, because pickles share values and fill them later.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(String),
    Bytes(Vec<u8>),
    List(Vec<Ref>),
    Tuple(Vec<Ref>),
    /// Entries in order; a later entry of the same key counts.
    Dict(Vec<(Ref, Ref)>),
    /// `module.name`.
    Global(String),
    /// A persistent id: in a checkpoint, a storage.
    Persistent(Ref),
    /// A call that was not made.
    Call {
        function: Ref,
        arguments: Ref,
    },
}

/// A pickle that was read.
#[derive(Debug)]
pub struct Pickle {
    pub values: Vec<Value>,
    pub root: Ref,
}

impl Pickle {
    pub fn get(&self, at: Ref) -> &Value {
        &self.values[at]
    }

    /// The entry `key` of the dictionary at `at`.
    pub fn entry(&self, at: Ref, key: &str) -> Option<Ref> {
        let Value::Dict(entries) = self.get(at) else { return None };
        let is_key = |(k, _): &&(Ref, Ref)| matches!(self.get(*k), Value::Text(text) if text == key);
        entries.iter().rev().find(is_key).map(|&(_, value)| value)
    }
}

/// Read a pickle.
pub fn read(bytes: &[u8]) -> Result<Pickle, String> {
    let mut machine =
        Machine { bytes, at: 0, values: Vec::new(), stack: Vec::new(), marks: Vec::new(), memo: HashMap::new() };
    let root = loop {
        let (at, operation) = (machine.at, machine.byte()?);
        if operation == b'.' {
            break machine.pop()?;
        }
        machine.step(operation).map_err(|e| format!("{e} at byte {at}"))?;
    };
    Ok(Pickle { values: machine.values, root })
}

struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    values: Vec<Value>,
    stack: Vec<Ref>,
    /// Heights of the stack.
    marks: Vec<usize>,
    memo: HashMap<u32, Ref>,
}

impl<'a> Machine<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], String> {
        let end = self.at.checked_add(count).filter(|&end| end <= self.bytes.len()).ok_or("it is cut off")?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn byte(&mut self) -> Result<u8, String> {
        Ok(self.take(1)?[0])
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    fn u32(&mut self) -> Result<u32, String> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn text(&mut self, length: usize) -> Result<String, String> {
        String::from_utf8(self.take(length)?.to_vec()).map_err(|_| "a text is not UTF-8".into())
    }

    fn line(&mut self) -> Result<String, String> {
        let length = self.bytes[self.at..].iter().position(|&b| b == b'\n').ok_or("it is cut off")?;
        let line = self.text(length)?;
        self.at += 1;
        Ok(line)
    }

    fn push(&mut self, value: Value) -> Result<(), String> {
        if self.values.len() >= MOST_VALUES {
            return Err(format!("it has more than {MOST_VALUES} values"));
        }
        self.values.push(value);
        self.stack.push(self.values.len() - 1);
        Ok(())
    }

    fn pop(&mut self) -> Result<Ref, String> {
        if self.marks.last().is_some_and(|&mark| self.stack.len() <= mark) {
            return Err("it takes a value behind a mark".into());
        }
        self.stack.pop().ok_or_else(|| "it takes a value of an empty stack".into())
    }

    fn top(&self) -> Result<Ref, String> {
        self.stack.last().copied().ok_or_else(|| "it reads an empty stack".into())
    }

    fn pop_to_mark(&mut self) -> Result<Vec<Ref>, String> {
        let mark = self.marks.pop().ok_or("it has no mark")?;
        Ok(self.stack.split_off(mark.min(self.stack.len())))
    }

    fn tuple(&mut self, count: usize) -> Result<(), String> {
        let mut items = (0..count).map(|_| self.pop()).collect::<Result<Vec<_>, _>>()?;
        items.reverse();
        self.push(Value::Tuple(items))
    }

    fn append(&mut self, items: Vec<Ref>) -> Result<(), String> {
        let list = self.top()?;
        match &mut self.values[list] {
            Value::List(list) => list.extend(items),
            _ => return Err("it appends to something that is no list".into()),
        }
        Ok(())
    }

    fn set(&mut self, items: &[Ref]) -> Result<(), String> {
        let dict = self.top()?;
        match &mut self.values[dict] {
            Value::Dict(entries) => entries.extend(items.chunks_exact(2).map(|pair| (pair[0], pair[1]))),
            _ => return Err("it sets an item of something that is no dictionary".into()),
        }
        Ok(())
    }

    fn remember(&mut self, key: u32) -> Result<(), String> {
        let top = self.top()?;
        if self.memo.len() >= MOST_VALUES {
            return Err(format!("it remembers more than {MOST_VALUES} values"));
        }
        self.memo.insert(key, top);
        Ok(())
    }

    fn recall(&mut self, key: u32) -> Result<(), String> {
        let value = self.memo.get(&key).copied().ok_or_else(|| format!("it recalls value {key}, which it has not"))?;
        self.stack.push(value);
        Ok(())
    }

    /// A call of a known constructor of dictionaries is an empty dictionary; any other stays a call.
    fn call(&mut self) -> Result<(), String> {
        let (arguments, function) = (self.pop()?, self.pop()?);
        let empty = matches!(&self.values[arguments], Value::Tuple(items) if items.is_empty());
        let ordered = matches!(&self.values[function], Value::Global(name) if name == "collections.OrderedDict");
        self.push(if ordered && empty { Value::Dict(Vec::new()) } else { Value::Call { function, arguments } })
    }

    fn step(&mut self, operation: u8) -> Result<(), String> {
        match operation {
            0x80 => match self.byte()? {
                2..=5 => Ok(()),
                protocol => Err(format!("its protocol is {protocol}, not 2 to 5")),
            },
            0x95 => self.take(8).map(drop), // The length of a frame.
            b'(' => {
                self.marks.push(self.stack.len());
                Ok(())
            }
            b'0' => self.pop().map(drop),
            b'1' => self.pop_to_mark().map(drop),
            b'N' => self.push(Value::None),
            0x88 => self.push(Value::Bool(true)),
            0x89 => self.push(Value::Bool(false)),
            b'J' => {
                let number = i32::from_le_bytes(self.array()?);
                self.push(Value::Int(number.into()))
            }
            b'K' => {
                let number = self.byte()?;
                self.push(Value::Int(number.into()))
            }
            b'M' => {
                let number = u16::from_le_bytes(self.array()?);
                self.push(Value::Int(number.into()))
            }
            0x8a => {
                let length = usize::from(self.byte()?);
                let digits = self.take(length)?;
                let negative = digits.last().is_some_and(|&b| b & 0x80 != 0);
                let mut number = [if negative { 0xff } else { 0 }; 8];
                number.get_mut(..length).ok_or("an integer has more than 64 bits")?.copy_from_slice(digits);
                self.push(Value::Int(i64::from_le_bytes(number)))
            }
            b'G' => {
                let number = f64::from_be_bytes(self.array()?);
                self.push(Value::Float(number))
            }
            b'X' | 0x8c => {
                let length = if operation == b'X' { self.u32()? as usize } else { self.byte()?.into() };
                let text = self.text(length)?;
                self.push(Value::Text(text))
            }
            b'B' | b'C' | b'T' | b'U' => {
                let long = matches!(operation, b'B' | b'T');
                let length = if long { self.u32()? as usize } else { self.byte()?.into() };
                let bytes = self.take(length)?.to_vec();
                self.push(Value::Bytes(bytes))
            }
            b'}' => self.push(Value::Dict(Vec::new())),
            b']' => self.push(Value::List(Vec::new())),
            b')' => self.push(Value::Tuple(Vec::new())),
            0x85..=0x87 => self.tuple(usize::from(operation - 0x84)),
            b't' => {
                let items = self.pop_to_mark()?;
                self.push(Value::Tuple(items))
            }
            b'a' => {
                let item = self.pop()?;
                self.append(vec![item])
            }
            b'e' => {
                let items = self.pop_to_mark()?;
                self.append(items)
            }
            b's' => {
                let (value, key) = (self.pop()?, self.pop()?);
                self.set(&[key, value])
            }
            b'u' => {
                let items = self.pop_to_mark()?;
                self.set(&items)
            }
            b'h' => {
                let key = self.byte()?;
                self.recall(key.into())
            }
            b'j' => {
                let key = self.u32()?;
                self.recall(key)
            }
            b'q' => {
                let key = self.byte()?;
                self.remember(key.into())
            }
            b'r' => {
                let key = self.u32()?;
                self.remember(key)
            }
            0x94 => {
                let key = u32::try_from(self.memo.len()).map_err(|e| e.to_string())?;
                self.remember(key)
            }
            b'c' => {
                let name = format!("{}.{}", self.line()?, self.line()?);
                self.push(Value::Global(name))
            }
            0x93 => {
                let (name, module) = (self.pop()?, self.pop()?);
                match (&self.values[module], &self.values[name]) {
                    // It may recall the same texts again and again.
                    (Value::Text(module), Value::Text(name)) if module.len().max(name.len()) > LONGEST_NAME => {
                        Err(format!("the name of a global has more than {LONGEST_NAME} bytes"))
                    }
                    (Value::Text(module), Value::Text(name)) => {
                        let name = format!("{module}.{name}");
                        self.push(Value::Global(name))
                    }
                    _ => Err("the name of a global is no text".into()),
                }
            }
            b'Q' => {
                let id = self.pop()?;
                self.push(Value::Persistent(id))
            }
            b'R' | 0x81 => self.call(),
            // The state of an object: attributes, such as the versions of a state dictionary.
            b'b' => self.pop().map(drop),
            _ => Err(format!("it has operation {operation:#04x}, which no checkpoint needs,")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `python3 -c "import pickle; print(pickle.dumps({'a': [1, -2, 3.5, None, True], 'b': ('x', 70000)}, 2))"`
    const DICT: &[u8] = b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01]q\x02(K\x01J\xfe\xff\xff\xffG@\x0c\x00\x00\x00\x00\x00\x00N\x88eX\x01\x00\x00\x00bq\x03X\x01\x00\x00\x00xq\x04Jp\x11\x01\x00\x86q\x05u.";

    #[test]
    fn values_come_back() {
        let pickle = read(DICT).unwrap();
        let list = pickle.entry(pickle.root, "a").unwrap();
        let Value::List(items) = pickle.get(list) else { panic!("{pickle:?}") };
        let items: Vec<&Value> = items.iter().map(|&at| pickle.get(at)).collect();
        assert_eq!(items, [&Value::Int(1), &Value::Int(-2), &Value::Float(3.5), &Value::None, &Value::Bool(true)]);
        let Value::Tuple(pair) = pickle.get(pickle.entry(pickle.root, "b").unwrap()) else { panic!("{pickle:?}") };
        assert_eq!((pickle.get(pair[0]), pickle.get(pair[1])), (&Value::Text("x".into()), &Value::Int(70000)));
    }

    #[test]
    fn a_call_is_a_record() {
        // os.system("true")
        let pickle = read(b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.").unwrap();
        let Value::Call { function, .. } = pickle.get(pickle.root) else { panic!("{pickle:?}") };
        assert_eq!(pickle.get(*function), &Value::Global("os.system".into()));
    }

    #[test]
    fn damage_is_an_error() {
        for length in 0..DICT.len() {
            assert!(read(&DICT[..length]).is_err(), "{length} bytes were enough");
        }
        for (bytes, want) in [
            (&b"\x80\x09."[..], "its protocol is 9, not 2 to 5 at byte 0"),
            (b"h\x05.", "it recalls value 5, which it has not at byte 0"),
            (b"K\x01K\x02a.", "it appends to something that is no list at byte 4"),
            (b"u.", "it has no mark at byte 0"),
            (b"i.", "it has operation 0x69, which no checkpoint needs, at byte 0"),
            (b"\x8a\x09123456789.", "an integer has more than 64 bits at byte 0"),
        ] {
            assert_eq!(read(bytes).unwrap_err(), want);
        }
    }
}
