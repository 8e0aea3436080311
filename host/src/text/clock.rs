//! `strftime`, for chat templates that write today's date and for reports. UTC.

use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// `time` in `format`, or the directive that is not known.
pub fn strftime(time: SystemTime, format: &str) -> Result<String, String> {
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let (year, month, day) = civil(days);
    let month_name = MONTHS[month as usize - 1];
    let day_name = DAYS[(days + 4) as usize % 7];
    let day_of_year = days - first_day(year) + 1;
    let hour12 = (hour + 11) % 12 + 1;

    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = chars.next();
        let padded = directive != Some('-');
        if !padded {
            directive = chars.next();
        }
        let two = |n: u64| if padded { format!("{n:02}") } else { n.to_string() };
        let text = match directive {
            Some('Y') => year.to_string(),
            Some('y') => two(year % 100),
            Some('m') => two(month),
            Some('d') => two(day),
            Some('H') => two(hour),
            Some('I') => two(hour12),
            Some('M') => two(minute),
            Some('S') => two(second),
            Some('j') if padded => format!("{day_of_year:03}"),
            Some('j') => day_of_year.to_string(),
            Some('B') => month_name.into(),
            Some('b') => month_name[..3].into(),
            Some('A') => day_name.into(),
            Some('a') => day_name[..3].into(),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.into(),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('Z') => "UTC".into(),
            Some('z') => "+0000".into(),
            Some('%') => "%".into(),
            other => return Err(format!("%{}", other.map(String::from).unwrap_or_default())),
        };
        out.push_str(&text);
    }
    Ok(out)
}

fn leap(year: u64) -> bool {
    year.is_multiple_of(4) && !year.is_multiple_of(100) || year.is_multiple_of(400)
}

/// Days from 1970-01-01 to the first day of `year`.
fn first_day(year: u64) -> u64 {
    let before = year - 1;
    (year - 1970) * 365 + (before / 4 - before / 100 + before / 400) - (1969 / 4 - 1969 / 100 + 1969 / 400)
}

/// Year, month and day of a day counted from 1970-01-01.
fn civil(days: u64) -> (u64, u64, u64) {
    let mut year = 1970 + days / 366;
    while first_day(year + 1) <= days {
        year += 1;
    }
    let mut rest = days - first_day(year);
    let lengths = [31, if leap(year) { 29 } else { 28 }, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 1;
    for length in lengths {
        if rest < length {
            break;
        }
        rest -= length;
        month += 1;
    }
    (year, month, rest + 1)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn at(seconds: u64, format: &str) -> String {
        strftime(UNIX_EPOCH + Duration::from_secs(seconds), format).unwrap()
    }

    /// Expected strings are what Python's `datetime.strftime` prints.
    #[test]
    fn known_dates() {
        assert_eq!(at(0, "%d %b %Y, %A %j"), "01 Jan 1970, Thursday 001");
        assert_eq!(at(951_782_400, "%d %B %Y"), "29 February 2000");
        assert_eq!(at(1_735_689_599, "%F %T %I%p %a %-d"), "2024-12-31 23:59:59 11PM Tue 31");
        assert_eq!(at(1_735_689_600, "%Y-%m-%d %j %%"), "2025-01-01 001 %");
        assert_eq!(at(4_107_542_400, "%F %H"), "2100-03-01 00");
    }

    #[test]
    fn unknown_directives_are_named() {
        assert_eq!(strftime(UNIX_EPOCH, "%Q"), Err("%Q".into()));
    }
}
