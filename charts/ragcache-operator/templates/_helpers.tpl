{{- define "ragcache.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride }}
{{- else if contains .Chart.Name .Release.Name -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}
{{- end -}}
{{- end -}}

{{/* Name of cluster-scoped objects: two releases of one name must not conflict. */}}
{{- define "ragcache.clusterName" -}}
{{ include "ragcache.fullname" . }}.{{ .Release.Namespace }}
{{- end -}}

{{- define "ragcache.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* commonLabels extend these and may override some, but no selector labels or labels of Helm. */}}
{{- define "ragcache.labels" -}}
{{- $fixed := include "ragcache.selector" . | fromYaml -}}
{{- $_ := set $fixed "app.kubernetes.io/managed-by" .Release.Service -}}
{{- $_ := set $fixed "helm.sh/chart" (printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "-") -}}
{{- $usual := dict "app.kubernetes.io/version" (include "ragcache.appVersion" .) -}}
{{- $_ := set $usual "app.kubernetes.io/part-of" "ragcache" -}}
{{ merge $fixed .Values.commonLabels $usual | toYaml }}
{{- end -}}

{{/* Labels and image tags must not contain the '+' of a local version. */}}
{{- define "ragcache.appVersion" -}}
{{ .Chart.AppVersion | replace "+" "-" | trunc 63 }}
{{- end -}}

{{- define "ragcache.images" -}}
{{- with .Values.image.registry }}{{ . }}/{{ end }}{{ .Values.image.repository }}
{{- end -}}

{{- define "ragcache.tag" -}}
{{ .Values.image.tag | default (include "ragcache.appVersion" .) }}
{{- end -}}

{{- define "ragcache.image" -}}
{{ include "ragcache.images" . }}/operator
{{- with .Values.image.digest }}@{{ . }}{{ else }}:{{ include "ragcache.tag" . }}{{ end }}
{{- end -}}

{{- define "ragcache.digests" -}}
{{- $given := list -}}
{{- range $name, $digest := .Values.image.digests -}}
{{- with $digest }}{{ $given = append $given (printf "%s=%s" $name .) }}{{ end -}}
{{- end -}}
{{ join "," $given }}
{{- end -}}

{{- define "ragcache.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "ragcache.fullname" .) }}
{{- end -}}

{{- define "ragcache.lease" -}}
{{ .Values.lease.name | default (include "ragcache.fullname" .) }}
{{- end -}}

{{/* The operator creates this Secret, with the root of its own API keys. */}}
{{- define "ragcache.rootKey" -}}
{{ include "ragcache.fullname" . }}-root-key
{{- end -}}

{{/* Namespaces that the operator serves, as a JSON list. An empty one means all. */}}
{{- define "ragcache.namespaces" -}}
{{- if and .Values.watch.allNamespaces .Values.watch.namespaces }}
{{- fail "watch.namespaces: watch.allNamespaces serves all; leave one of them out" }}
{{- end }}
{{- if .Values.watch.allNamespaces -}}
[]
{{- else -}}
{{ .Values.watch.namespaces | default (list .Release.Namespace) | toJson }}
{{- end -}}
{{- end -}}
